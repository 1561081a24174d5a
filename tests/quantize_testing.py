"""Small checkpoints with a state format, for the tests of quantize-state."""

import hashlib
from dataclasses import replace
from pathlib import Path

import torch

from checkpoint_testing import save_state_spaces
from mamba_cli.checkpoint import open_checkpoint
from mamba_cli.config import ModelConfig
from mamba_cli.convert import convert
from mamba_cli.quantize.saved import Scales, write_quantized
from mamba_cli.quantize.section import state_heads
from mamba_cli.state_format import StateFormat, layer_seed
from mamba_kernels.packed_state import LayerFormat
from model_testing import BASE, variant

MAMBA1 = variant(layer="Mamba1", headdim=1, rmsnorm=False, dt_rank=4, d_state=8, chunk_size=256)
IDS = torch.randint(BASE.vocab_size, (2, 30), generator=torch.Generator().manual_seed(0))


def some_format(config: ModelConfig = BASE, seed: int = 5, **changes) -> StateFormat:
    """int8 with one fp16 head in layer 0 (fp16 alone where there is one head)."""
    heads = ["int8"] * state_heads(config)
    heads[-1] = "fp16"
    layers = tuple(
        None
        if index in config.attn_layer_idx
        else LayerFormat(
            tuple(heads) if index == 0 else ("int8",) * len(heads), "stochastic", 4, layer_seed(seed, index)
        )
        for index in range(config.n_layer)
    )
    return replace(StateFormat(layers=layers, conv="auto", name="int8:4"), **changes)


def some_scales(config: ModelConfig = BASE, outer: bool = False) -> Scales:
    generator = torch.Generator().manual_seed(1)

    def each(*shape: int) -> tuple[torch.Tensor | None, ...]:
        return tuple(
            None if index in config.attn_layer_idx else torch.rand(shape, generator=generator) + 0.5
            for index in range(config.n_layer)
        )

    lives = (config.nheads,) if config.layer == "Mamba2" else (config.d_inner, config.d_state)
    columns = each(state_heads(config), config.d_state)
    return Scales(each(*lives), columns if outer else (None,) * config.n_layer, each(config.conv_dim))


def save(folder: Path, to: str = "state-spaces", config: ModelConfig = BASE) -> Path:
    source = save_state_spaces(folder / "plain", config)
    (source / "README.md").write_text("read me")
    if to == "state-spaces":
        return source
    convert(source, folder / to, to)
    (folder / to / "README.md").write_text("read me")
    return folder / to


def digest(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def quantize(source: Path, destination: Path, config: ModelConfig = BASE, outer: bool = False, **options):
    return write_quantized(
        open_checkpoint(source), destination, some_format(config), some_scales(config, outer), **options
    )
