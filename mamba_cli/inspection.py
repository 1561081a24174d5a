"""What a checkpoint is: sizes, bytes, state, tokenizer, and how long each layer's heads remember.

Everything here comes from the configuration, the tensors' headers and the small tensors A_log and
dt_bias, so inspecting a large model is quick. Reading every tensor is `mamba_cli.soundness`.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from mamba_cli.checkpoint import Checkpoint
from mamba_cli.config import ModelConfig
from mamba_cli.errors import Mamba2Error
from mamba_cli.quantize.saved import describe_saved, read_saved
from mamba_cli.schema import tensor_shapes
from mamba_cli.state import init_state
from mamba_cli.state_format import StateFormat, half_lives, parse_state_spec, recommended_format
from mamba_cli.storage import StoredTensor, dtype_name
from mamba_cli.tokenizer import DEFAULT_TOKENIZER, DEFAULT_VOCAB_SIZES, find_tokenizer, load_tokenizer
from mamba_kernels.packed_state import STATE_DTYPES


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters by part. A tied head is the embedding, so it counts 0 here.

    `norms` are the block norms and the final one; the norm inside a mixer counts to the mixer.
    """

    total: int
    embedding: int
    mixers: int
    mlps: int
    norms: int
    head: int


@dataclass(frozen=True)
class StoredBytes:
    """Tensors of one dtype in the checkpoint's files."""

    dtype: str
    tensors: int
    parameters: int
    nbytes: int


@dataclass(frozen=True)
class StateBytes:
    """Bytes one sequence's memory takes when the SSM state is kept in `dtype`, as --state-dtype means it.

    ssm: all layers' SSM states, with the scales and the window of recent tokens that belong to a
    quantized one, and heads with a long memory in a wider dtype. conv: all layers' convolution windows,
    and kv_per_token: keys and values of all attention layers for one token; both in fp32 for fp32, else
    in 16 bits, or as a saved format has it. saved: whether it is the format that lies with the checkpoint,
    `dtype` then its name, which may be one of those dtypes with other heads in a wider one.
    """

    dtype: str
    ssm: int
    conv: int
    kv_per_token: int
    saved: bool = False


@dataclass(frozen=True)
class HalfLife:
    """Tokens until a head's memory has decayed to one half: over the heads of one layer.

    Mamba-1: over every (channel, state). The median of an even number is the lower of the middle two.
    """

    smallest: float
    median: float
    largest: float


@dataclass(frozen=True)
class TokenizerFacts:
    """The tokenizer beside the weights; kind None means there is none, and hint what to use instead.

    kind: the name of its file. problem: why it cannot be used with this model, None where it can.
    """

    kind: str | None
    size: int | None = None
    bos_id: int | None = None
    eos_id: int | None = None
    pad_id: int | None = None
    problem: str | None = None
    hint: str | None = None


@dataclass(frozen=True)
class Layer:
    """One layer. `half_life` is None for attention, which forgets nothing."""

    index: int
    kind: str  # "Mamba2", "Mamba1" or "attention"
    half_life: HalfLife | None


@dataclass(frozen=True)
class Inspection:
    """The facts of one checkpoint. `padding` counts the embedding's rows that stand for no token.

    `state_quantization` says in words how the checkpoint wants its state kept, None where it does not.
    `notes` are what a reader should know besides, one line each.
    """

    model: str
    folder: str
    format: str
    reason: str
    family: str
    config: ModelConfig
    parameters: Parameters
    stored: tuple[StoredBytes, ...]
    padding: int
    state: tuple[StateBytes, ...]
    state_quantization: str | None
    tokenizer: TokenizerFacts
    layers: tuple[Layer, ...]
    notes: tuple[str, ...]


def inspect_checkpoint(checkpoint: Checkpoint, model: str) -> Inspection:
    """Gather the facts of an opened checkpoint; `model` is what the user called it."""
    config = checkpoint.config
    lives = [_half_lives(checkpoint, index) for index in range(config.n_layer)]
    saved = read_saved(checkpoint)
    state = [state_bytes(config, dtype, lives) for dtype in STATE_DTYPES]
    if saved:
        state.append(saved_state_bytes(config, saved[0]))
    return Inspection(
        model=model,
        folder=str(checkpoint.folder),
        format=checkpoint.format,
        reason=checkpoint.reason,
        family=family(config),
        config=config,
        parameters=count_parameters(config),
        stored=stored_bytes(checkpoint),
        padding=config.vocab_rows - config.vocab_size,
        state=tuple(state),
        state_quantization=describe_saved(*saved) if saved else None,
        tokenizer=tokenizer_facts(checkpoint),
        layers=tuple(_layer(config, index, of_layer) for index, of_layer in enumerate(lives)),
        notes=checkpoint.notes,
    )


def family(config: ModelConfig) -> str:
    """The model's kind in words."""
    name = {"Mamba1": "Mamba-1", "Mamba2": "Mamba-2"}[config.layer]
    if config.bcdt_norm_eps is not None:
        name += " with norms on B, C and dt (FalconMamba)"
    return f"{name} with attention layers" if config.attn_layer_idx else name


def dimensions(config: ModelConfig) -> dict[str, Any]:
    """Return every size and switch by mamba_ssm's name, without those this kind of layer lacks.

    vocab_rows, d_inner, nheads and conv_dim follow from the others.
    """
    mamba1 = {"dt_rank": config.dt_rank, "bcdt_norm_eps": config.bcdt_norm_eps}
    mamba2 = {
        "d_ssm": config.d_ssm,
        "headdim": config.headdim,
        "nheads": config.nheads,
        "ngroups": config.ngroups,
        "chunk_size": config.chunk_size,
        "D_has_hdim": config.D_has_hdim,
        "rmsnorm": config.rmsnorm,
        "gated_norm_eps": config.gated_norm_eps,
        "norm_before_gate": config.norm_before_gate,
        "dt_limit": list(config.dt_limit),
    }
    return {
        "layer": config.layer,
        "d_model": config.d_model,
        "n_layer": config.n_layer,
        "d_intermediate": config.mlp_dim,
        "vocab_size": config.vocab_size,
        "vocab_rows": config.vocab_rows,
        "tie_embeddings": config.tie_embeddings,
        "d_state": config.d_state,
        "d_conv": config.d_conv,
        "expand": config.d_inner / config.d_model,
        "d_inner": config.d_inner,
        "conv_dim": config.conv_dim,
        **(mamba2 if config.layer == "Mamba2" else mamba1),
        "bias": config.bias,
        "conv_bias": config.conv_bias,
        "rms_norm": config.rms_norm,
        "norm_eps": config.norm_eps,
        "residual_in_fp32": config.residual_in_fp32,
        "attn_layer_idx": list(config.attn_layer_idx),
        "attn_cfg": asdict(config.attention) if config.attention else {},
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
    }


def count_parameters(config: ModelConfig) -> Parameters:
    """Count the parameters of a model of this configuration."""
    counts = dict.fromkeys(("embedding", "mixers", "mlps", "norms", "head"), 0)
    for name, shape in tensor_shapes(config).items():
        counts[_part(name)] += math.prod(shape)
    return Parameters(total=sum(counts.values()), **counts)


def _part(name: str) -> str:
    for fragment, part in ((".mixer.", "mixers"), (".mlp.", "mlps"), (".embedding.", "embedding")):
        if fragment in name:
            return part
    return "head" if name.startswith("lm_head.") else "norms"


def stored_bytes(checkpoint: Checkpoint) -> tuple[StoredBytes, ...]:
    """Sum the tensors by the dtype they are stored in, most bytes first."""
    by_dtype: dict[str, list[StoredTensor]] = {}
    for tensor in checkpoint.tensors.values():
        by_dtype.setdefault(dtype_name(tensor.dtype), []).append(tensor)
    stored = [
        StoredBytes(
            dtype, len(group), sum(math.prod(one.shape) for one in group), sum(one.nbytes for one in group)
        )
        for dtype, group in by_dtype.items()
    ]
    return tuple(sorted(stored, key=lambda entry: -entry.nbytes))


def state_bytes(config: ModelConfig, dtype: str, lives: Sequence[torch.Tensor | None]) -> StateBytes:
    """Return the bytes that one sequence's state is allocated with its SSM states in `dtype`.

    lives: half-lives of each layer, None for attention.
    """
    spec = parse_state_spec(dtype)
    state_format = None if spec.plain else recommended_format(config, lives, spec)
    return _allocated(config, dtype, spec.plain, state_format)


def saved_state_bytes(config: ModelConfig, state_format: StateFormat) -> StateBytes:
    """Return the bytes that one sequence's state is allocated in the format that lies with a checkpoint."""
    return replace(_allocated(config, state_format.name, None, state_format), saved=True)


def _allocated(
    config: ModelConfig, dtype: str, plain: torch.dtype | None, state_format: StateFormat | None
) -> StateBytes:
    activations = torch.float32 if dtype == "fp32" else torch.bfloat16
    state = init_state(config, 1, activations, torch.device("meta"), plain, state_format)
    conv = sum(layer.conv.nbytes for layer in state.layers if layer.conv is not None)
    kv = 0
    if config.attention is not None:
        heads = 2 * config.attention.num_heads_kv * config.attention.head_dim
        kv = len(config.attn_layer_idx) * heads * activations.itemsize
    return StateBytes(dtype, ssm=state.nbytes - conv, conv=conv, kv_per_token=kv)


def tokenizer_facts(checkpoint: Checkpoint) -> TokenizerFacts:
    """Describe the tokenizer that lies with the checkpoint; nothing is fetched."""
    config = checkpoint.config
    beside = str(checkpoint.folder)
    try:
        find_tokenizer(checkpoint.folder, config, beside)
    except Mamba2Error:
        usual = config.vocab_size in DEFAULT_VOCAB_SIZES
        hint = f"such models use {DEFAULT_TOKENIZER}" if usual else "name one with --tokenizer PATH_OR_REPO"
        return TokenizerFacts(None, hint=hint)
    kind = next(
        path.name
        for pattern in ("tokenizer.json", "tokenizer.model*", "vocab.json")
        for path in sorted(checkpoint.folder.glob(pattern))
    )
    try:
        tokenizer = load_tokenizer(checkpoint, beside)
    except Mamba2Error as error:
        return TokenizerFacts(kind, problem=error.message, hint=error.hint)
    return TokenizerFacts(kind, tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id)


def _half_lives(checkpoint: Checkpoint, index: int) -> torch.Tensor | None:
    config = checkpoint.config
    if index in config.attn_layer_idx:
        return None
    mixer = f"backbone.layers.{index}.mixer."
    dt_bias = "dt_bias" if config.layer == "Mamba2" else "dt_proj.bias"
    A_log, bias = (checkpoint.tensors[mixer + name].load() for name in ("A_log", dt_bias))
    return half_lives(A_log, bias, config.dt_limit)


def _layer(config: ModelConfig, index: int, lives: torch.Tensor | None) -> Layer:
    if lives is None:
        return Layer(index, "attention", None)
    return Layer(index, config.layer, HalfLife(lives.min().item(), lives.median().item(), lives.max().item()))
