"""Which layers suffer from a narrow state, and which of them are widened until the loss is small enough."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mamba_cli.language_model import LanguageModel
from mamba_cli.perplexity.evaluate import Progress
from mamba_cli.perplexity.plan import Plan
from mamba_cli.quantize.report import Loss, measure_losses
from mamba_cli.state_format import StateFormat
from mamba_cli.state_recipe import ONE_SHOT

# The next wider dtype, as far as 16 bits: a state in fp32 is the one that it is compared with.
WIDER = {"int4": "int8", "int8": "fp16", "fp8": "fp16", "bf16": "fp16"}
# Layers that are scored side by side, each in a model of its own that shares the weights.
LAYERS_AT_ONCE = 8
# A round of widening takes one layer in so many, the most sensitive first.
WIDENED_SHARE = 8


@dataclass(frozen=True)
class LayerSensitivity:
    """One layer's divergence when its state alone is kept in the format, the others' in fp32.

    kl: KL(fp32 || this) in nats, mean over predictions; nll_change: mean absolute change of the NLL.
    """

    layer: int
    kl: float
    nll_change: float


@dataclass(frozen=True)
class Widened:
    """What was reached for a target: the format, its loss, and the layers that were widened, in order."""

    format: StateFormat
    loss: Loss
    layers: tuple[int, ...]
    met: bool


MakeModel = Callable[[StateFormat], LanguageModel]


def measure_layers(
    make: MakeModel,
    format: StateFormat,
    reference: LanguageModel,
    plan: Plan,
    progress: Progress | None = None,
) -> list[LayerSensitivity]:
    """Score every layer alone in `format`; make: returns the model with its state in a format."""
    layers = [index for index, layer in enumerate(format.layers) if layer is not None]
    found: list[LayerSensitivity] = []
    for first in range(0, len(layers), LAYERS_AT_ONCE):
        group = layers[first : first + LAYERS_AT_ONCE]
        models = [make(only(format, index)) for index in group]
        losses = measure_losses(models, reference, plan, progress)
        found += [
            LayerSensitivity(index, loss.kl, loss.nll_change)
            for index, loss in zip(group, losses, strict=True)
        ]
    return found


def reach(
    target: float,
    make: MakeModel,
    format: StateFormat,
    layers: Sequence[LayerSensitivity],
    reference: LanguageModel,
    plan: Plan,
    progress: Progress | None = None,
) -> Widened:
    """Widen the most sensitive layers until the perplexity grows by at most `target`, a share of it.

    A layer is widened whole, each head to its next wider dtype. met is False where nothing is left to
    widen and the target still is not reached.
    """
    left = {layer.layer: layer.kl for layer in layers}
    widened: list[int] = []
    while True:
        [loss] = measure_losses([make(format)], reference, plan, progress)
        narrow = sorted((index for index in left if can_widen(format, index)), key=lambda index: -left[index])
        if loss.change <= target or not narrow:
            return Widened(format, loss, tuple(widened), loss.change <= target)
        for index in narrow[: max(1, len(left) // WIDENED_SHARE)]:
            left[index] *= max(map(_left, format.layers[index].heads))
            format = widen(format, index)
            widened.append(index)


def only(format: StateFormat, layer: int) -> StateFormat:
    """Return `format` for one layer, and fp32 for all others."""
    return _with_heads(format, lambda index, dtype: dtype if index == layer else "fp32")


def widen(format: StateFormat, layer: int) -> StateFormat:
    """Return `format` with every head of one layer in its next wider dtype."""
    return _with_heads(format, lambda index, dtype: WIDER.get(dtype, dtype) if index == layer else dtype)


def can_widen(format: StateFormat, layer: int) -> bool:
    """Whether a head of the layer has a next wider dtype."""
    return any(dtype in WIDER for dtype in format.layers[layer].heads)


def _left(dtype: str) -> float:
    """Return the share of a divergence that widening leaves: it goes with the square of the rounding error.

    That only orders the layers; what is reached is measured.
    """
    return (ONE_SHOT[WIDER[dtype]] / ONE_SHOT[dtype]) ** 2 if dtype in WIDER else 0.0


def _with_heads(format: StateFormat, change: Callable[[int, str], str]) -> StateFormat:
    layers = (
        layer and replace(layer, heads=tuple(change(index, dtype) for dtype in layer.heads))
        for index, layer in enumerate(format.layers)
    )
    return replace(format, layers=tuple(layers))
