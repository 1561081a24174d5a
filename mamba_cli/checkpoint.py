"""A checkpoint that was opened: its configuration, and its tensors by canonical name, each checked.

Nothing in it is random, guessed or left over: every tensor that the configuration asks for is there in
its shape, and no other.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mamba_cli import formats
from mamba_cli.config import ModelConfig
from mamba_cli.errors import Mamba2Error
from mamba_cli.formats.format import EMBEDDING, HEAD, Format, count_layers
from mamba_cli.hub import resolve
from mamba_cli.schema import Shape, tensor_shapes
from mamba_cli.storage import StoredTensor, same_bits

WEIGHT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk.

    format: the name that --to takes; reason: why it was recognised as that; tensors: by canonical name,
    in the order of `schema.tensor_shapes`; notes: what a user should know, one line each.
    """

    folder: Path
    format: str
    reason: str
    config: ModelConfig
    tensors: dict[str, StoredTensor]
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors. A tied head is not one of them."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def open_checkpoint(model: str | Path, revision: str | None = None) -> Checkpoint:
    """Open a folder, the embedded model ("demo") or a repo of the hub; no tensor's data is kept.

    revision: branch, tag or commit of a repo. Raises Mamba2Error where the checkpoint cannot be found or
    trusted, or does not agree with itself.
    """
    folder = resolve(model, revision)
    format, reason = formats.detect(folder)
    config, stored = format.read(folder)
    _check_layers(config, stored)
    config, notes = _settle_head(config, stored)
    shapes = tensor_shapes(config)
    _check_tensors(format, shapes, stored)
    return Checkpoint(folder, format.name, reason, config, {name: stored[name] for name in shapes}, notes)


def _check_layers(config: ModelConfig, stored: dict[str, StoredTensor]) -> None:
    # Before shapes are made for every layer: a configuration can claim a billion of them.
    layers = count_layers(stored)
    if layers != config.n_layer:
        raise Mamba2Error(f"layers: expected {config.n_layer} as the configuration says, got {layers}")


def _settle_head(config: ModelConfig, stored: dict[str, StoredTensor]) -> tuple[ModelConfig, tuple[str, ...]]:
    """Drop a tied head, which is a second copy of the embedding. A head that differs is the model's own."""
    embedding, head = stored.get(EMBEDDING), stored.get(HEAD)
    if not config.tie_embeddings or embedding is None or head is None:
        return config, ()
    if embedding.shape != head.shape:
        raise Mamba2Error(
            f"{head.name}: expected shape {embedding.shape} of the embedding it is tied to, got {head.shape}"
        )
    if same_bits(embedding.load(), head.load()):
        del stored[HEAD]
        return config, ()
    note = f"{head.name} differs from the embedding that the configuration ties it to; it is used as it is"
    return replace(config, tie_embeddings=False), (note,)


def _check_tensors(format: Format, shapes: dict[str, Shape], stored: dict[str, StoredTensor]) -> None:
    """Raise where tensors are missing, unknown, of another shape or not of floating-point numbers."""
    problems = [
        f"{format.stored_name(name)}: expected shape {shape}, got no such tensor"
        for name, shape in shapes.items()
        if name not in stored
    ]
    for name, tensor in stored.items():
        if name not in shapes:
            problems.append(f"{tensor.name}: expected no such tensor, got shape {tensor.shape}")
        elif tensor.shape != shapes[name]:
            problems.append(f"{tensor.name}: expected shape {shapes[name]}, got {tensor.shape}")
        elif tensor.dtype not in WEIGHT_DTYPES:
            problems.append(f"{tensor.name}: expected float64, 32, 16 or bfloat16, got {tensor.dtype}")
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise Mamba2Error("; ".join(problems[:3]) + more, "the configuration and the tensors disagree")
