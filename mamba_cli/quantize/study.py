"""From a request to a chosen state format with its figures: what `mamba2 quantize-state` does."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial

import torch

from mamba_cli.errors import Mamba2Error
from mamba_cli.language_model import LanguageModel
from mamba_cli.perplexity.plan import Plan, make_plan
from mamba_cli.quantize.calibrate import calibrate
from mamba_cli.quantize.report import TIMED_RUNS, Cost, Loss, measure_cost, measure_losses
from mamba_cli.quantize.saved import Scales
from mamba_cli.quantize.sensitivity import LAYERS_AT_ONCE, LayerSensitivity, measure_layers, reach
from mamba_cli.state_format import StateFormat, parse_state_spec, recommended_format

# Windows that a layer is tried on alone: several side by side, each long enough for the state to fill.
LAYER_WINDOW = 128

# By the name that people read: what LanguageModel.with_state makes the model of.
Tensors = Sequence[torch.Tensor | None] | None
Formats = dict[str, tuple[str | StateFormat, Tensors, Tensors]]

# Shows the progress of a stretch of work: a total and a label, and inside the block a call for each piece.
Bars = Callable[[float | None, str], AbstractContextManager[Callable[..., None]]]


@dataclass(frozen=True)
class Request:
    """What is asked for.

    state_dtype: in words; recipe: instead of them, a format and whether it has column scales; target: the
    most that the perplexity may grow by, as a share of it, or None.
    """

    state_dtype: str
    recipe: tuple[StateFormat, bool] | None = None
    target: float | None = None
    sensitivity_tokens: int = 512
    seed: int = 0


@dataclass(frozen=True)
class Choice:
    """A format, and what was found on the way.

    outer: whether the format has column scales; measured: everything that the text told; layers: of each
    layer alone in the format that the request means, before any was widened; widened: layers in the order
    they were, some more than once.
    """

    format: StateFormat
    outer: bool
    measured: Scales
    layers: tuple[LayerSensitivity, ...]
    widened: tuple[int, ...]

    @property
    def scales(self) -> Scales:
        """What is kept with the format."""
        return self.measured.kept(self.outer)


def choose(lm: LanguageModel, plan: Plan, request: Request, bars: Bars) -> Choice:
    """Calibrate on the plan's text and choose; lm keeps its state in fp32.

    Raises Mamba2Error where the target cannot be reached, naming what was.
    """
    with bars(sum(window.length for window in plan.windows), "calibrating") as advance:
        scales = calibrate(lm, plan, advance)
    format, outer = request.recipe or _recommended(lm, scales, request.state_dtype, request.seed)
    make = partial(lm.with_state, columns=scales.columns if outer else None, conv_peaks=scales.conv)
    layers = _sensitivity(lm, plan, request, format, make, bars)
    if request.target is None:
        return Choice(format, outer, scales, tuple(layers), ())
    with bars(None, "widening layers") as advance:
        reached = reach(request.target, make, format, layers, lm, plan, lambda tokens, nll: advance(tokens))
    if not reached.met:
        raise Mamba2Error(
            f"target: expected a perplexity increase of at most {100 * request.target:.4g}%, got "
            f"{100 * reached.loss.change:.4g}% with every head of {format.name} in 16 bits",
            "a larger --target-ppl-increase, or a longer --calibrate text, if the error is of its size",
        )
    # Another name: the words alone mean the format before.
    chosen = replace(reached.format, name=f"{format.name}+") if reached.layers else format
    return Choice(chosen, outer, scales, tuple(layers), reached.layers)


def formats_beside(lm: LanguageModel, choice: Choice, specs: Sequence[str], seed: int) -> Formats:
    """Return the formats that `specs` mean for this model, by name, fp32 left out, and the chosen one."""
    measured = choice.measured

    def with_scales(format: StateFormat, outer: bool) -> tuple[StateFormat, Tensors, Tensors]:
        return format, measured.columns if outer else None, measured.conv

    formats: Formats = {}
    for spec in specs:
        if parse_state_spec(spec).plain is None:
            formats[spec] = with_scales(*_recommended(lm, measured, spec, seed))
        elif spec != "fp32":
            formats[spec] = spec, None, None
    return formats | {choice.format.name: with_scales(choice.format, choice.outer)}


def compare_losses(lm: LanguageModel, plan: Plan, formats: Formats, bars: Bars) -> dict[str, Loss]:
    """Score each format against the fp32 state of lm, all in one pass."""
    models = [lm.with_state(*arguments) for arguments in formats.values()]
    with bars(plan.predictions, "comparing") as advance:
        losses = measure_losses(models, lm, plan, lambda tokens, nll: advance(tokens))
    return dict(zip(formats, losses, strict=True))


def measure_costs(lm: LanguageModel, formats: Formats, batch: int | None, bars: Bars) -> dict[str, Cost]:
    """Measure what fp32, and each format, take; lm keeps its state in fp32."""
    models = {"fp32": lm} | {name: lm.with_state(*arguments) for name, arguments in formats.items()}
    with bars(2 * TIMED_RUNS * len(models), "timing") as advance:
        return {
            name: measure_cost(model, batch, lambda amount, label=None: advance(amount))
            for name, model in models.items()
        }


def _recommended(lm: LanguageModel, scales: Scales, spec: str, seed: int) -> tuple[StateFormat, bool]:
    """Return the format that words mean for this model and text, and whether it has column scales.

    A head counts as remembering for as long as the text or the weights alone say, whichever is longer: dt
    follows the text, and another text, or a stretch of this one, may let a head remember as its weights say.
    """
    parsed = parse_state_spec(spec)
    lives = [
        None if measured is None else torch.maximum(measured.double(), of_weights.double())
        for measured, of_weights in zip(scales.half_lives, lm.half_lives(), strict=True)
    ]
    return recommended_format(lm.config, lives, parsed, seed), parsed.outer


def _sensitivity(
    lm: LanguageModel,
    plan: Plan,
    request: Request,
    format: StateFormat,
    make: Callable[[StateFormat], LanguageModel],
    bars: Bars,
) -> list[LayerSensitivity]:
    tokens = request.sensitivity_tokens
    if not tokens:
        return []
    window = min(LAYER_WINDOW, plan.window, tokens)
    small = make_plan(plan.documents, lm.tokenizer, "step", window, max_windows=max(1, tokens // window))
    passes = -(-sum(layer is not None for layer in format.layers) // LAYERS_AT_ONCE)
    with bars(passes * small.predictions, "each layer alone") as advance:
        return measure_layers(make, format, lm, small, lambda tokens, nll: advance(tokens))
