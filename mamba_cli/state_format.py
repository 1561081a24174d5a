"""How a model keeps its SSM states: what the user asks for, and the format of each layer that follows."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from mamba_cli import state_recipe
from mamba_cli.config import ModelConfig
from mamba_cli.errors import Mamba2Error
from mamba_cli.state_recipe import RECOMMENDED, choose_heads
from mamba_kernels.packed_state import ROUNDINGS, STATE_DTYPES, LayerFormat

# Formats that, with no words after them, are a plain tensor, rewritten whole at every token.
PLAIN_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# What a plain tensor's dtype is called.
PLAIN_NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
LARGEST_WINDOW = 64
# Rounding and window of a format that rounds nothing.
UNROUNDED = ("nearest", 8)
CONV_FORMATS = ("auto", "bf16", "fp8", "int8")
HINT = "for example int8, or with words after it int8:nearest:1 (rounding, window), int4:outer, int8:uniform"


@dataclass(frozen=True)
class StateSpec:
    """What a user asks for; None and False leave it to the recommended recipe.

    dtype: the base format, one of STATE_DTYPES. rounding: one of ROUNDINGS. window: tokens that are kept
    exactly before they are folded into the state at once; 1 rewrites the state at every token. outer:
    static scales by (head, d_state) column beside the dynamic ones, which need a calibration. uniform:
    every head in the base format, however long it remembers.
    """

    dtype: str
    rounding: str | None = None
    window: int | None = None
    outer: bool = False
    uniform: bool = False

    @property
    def plain(self) -> torch.dtype | None:
        """The dtype of a plain tensor, where that is what the words mean; None for a packed state."""
        bare = self == StateSpec(self.dtype)
        return PLAIN_DTYPES.get(self.dtype) if bare else None

    def __str__(self) -> str:
        words = [self.dtype, self.rounding, self.window, "outer" * self.outer, "uniform" * self.uniform]
        return ":".join(str(word) for word in words if word)


@dataclass(frozen=True)
class StateFormat:
    """How each layer keeps its memory.

    layers: the format of each layer's SSM state, None for attention. conv: the format of the convolution
    windows, one of CONV_FORMATS; "auto" is the model's dtype. name: what the user calls it all.
    """

    layers: tuple[LayerFormat | None, ...]
    conv: str = "auto"
    name: str = ""


def parse_state_spec(text: str) -> StateSpec:
    """Return what `text` asks for: a dtype, then words in any order with colons between.

    Raises Mamba2Error, its message beginning "state-dtype:", for what is no such thing.
    """
    dtype, *words = text.split(":")
    if dtype not in STATE_DTYPES:
        raise Mamba2Error(f"state-dtype: expected one of {', '.join(STATE_DTYPES)}, got {dtype!r}", HINT)
    found: dict[str, str | int | bool] = {}
    for word in words:
        if word in ROUNDINGS:
            name, value = "rounding", word
        elif word.isdecimal() and word.isascii() and 1 <= int(word[:9]) <= LARGEST_WINDOW:
            name, value = "window", int(word)
        elif word in ("outer", "uniform"):
            name, value = word, True
        else:
            expected = f"{', '.join(ROUNDINGS)}, a window from 1 to {LARGEST_WINDOW}, outer or uniform"
            raise Mamba2Error(f"state-dtype: expected {expected} after {dtype}:, got {word!r}", HINT)
        if name in found:
            raise Mamba2Error(f"state-dtype: expected one {name}, got two in {text}", HINT)
        found[name] = value
    return StateSpec(dtype, **found)


def recommended_format(
    config: ModelConfig, half_lives: Sequence[torch.Tensor | None], spec: StateSpec, seed: int = 0
) -> StateFormat:
    """Return the format that `spec` asks for, what it leaves open chosen by each head's half-life.

    half_lives: of each layer, as `half_lives` gives them; None for attention.
    """
    layers = tuple(
        None if lives is None else _layer_format(config, lives, spec, layer_seed(seed, index))
        for index, lives in enumerate(half_lives)
    )
    return StateFormat(layers, name=str(spec))


def layer_seed(seed: int, index: int) -> int:
    """Return the seed of layer `index` in a format of `seed`: layers round independently of each other."""
    return seed + index


def _layer_format(config: ModelConfig, lives: torch.Tensor, spec: StateSpec, seed: int) -> LayerFormat:
    rounding, window = RECOMMENDED.get(spec.dtype, UNROUNDED)
    window = spec.window or window
    lives = lives[None] if config.layer == "Mamba1" else lives  # its channels count as one head
    heads = (spec.dtype,) * len(lives) if spec.uniform else choose_heads(lives, spec.dtype, window)
    return LayerFormat(heads, spec.rounding or rounding, window, seed)


def half_lives(A_log: torch.Tensor, dt_bias: torch.Tensor, dt_limit: tuple[float, float]) -> torch.Tensor:
    """Return the tokens after which a state is halved when in_proj contributes nothing to dt.

    The state decays by exp(dt*A) a token (zero-order hold: Gu and Dao 2023, arXiv:2312.00752,
    equation 4), dt = softplus(dt_bias) clamped to dt_limit and A = -exp(A_log) (mamba_ssm's
    Mamba2.step), so half of it is left after ln 2 / (dt*exp(A_log)) tokens. Text moves dt from there.

    A_log: (nheads,) for Mamba-2, (d_inner, d_state) for Mamba-1. dt_bias: (nheads,) or (d_inner,).
    The result is float64 in A_log's shape; infinite where nothing decays.
    """
    dt = F.softplus(dt_bias.double()).clamp(*dt_limit)
    return state_recipe.half_lives(-A_log.double().exp(), dt)
