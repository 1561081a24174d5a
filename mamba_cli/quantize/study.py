"""From a request to a chosen state format with its figures: what `mamba2 quantize-state` does."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from mamba_cli.errors import Mamba2Error
from mamba_cli.language_model import LanguageModel
from mamba_cli.perplexity.plan import Plan, make_plan
from mamba_cli.quantize.calibrate import calibrate
from mamba_cli.quantize.report import TIMED_RUNS, FormatReport, measure_cost, measure_losses
from mamba_cli.quantize.saved import Scales, read_recipe
from mamba_cli.quantize.sensitivity import LAYERS_AT_ONCE, LayerSensitivity, measure_layers, reach
from mamba_cli.state_format import StateFormat, parse_state_spec, recommended_format

# Windows that a layer is tried on alone: several side by side, each long enough for the state to fill.
LAYER_WINDOW = 128

# Shows the progress of a stretch of work: a total and a label, and inside the block a call for each piece.
Bars = Callable[[float | None, str], AbstractContextManager[Callable[..., None]]]


@dataclass(frozen=True)
class Request:
    """What is asked for: a format in words or in a file, a target as a share of perplexity, or none."""

    state_dtype: str
    recipe: Path | None = None
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
    format, outer = _first_format(lm, scales, request)
    make = partial(lm.with_state, columns=scales.columns if outer else None)
    layers = _sensitivity(lm, plan, request, format, make, bars)
    if request.target is None:
        return Choice(format, outer, scales, tuple(layers), ())
    with bars(None, "widening layers") as advance:
        reached = reach(request.target, make, format, layers, lm, plan, lambda tokens, nll: advance(tokens))
    if not reached.met:
        raise Mamba2Error(
            f"target: expected a perplexity increase of at most {request.target:.4g}, got "
            f"{reached.loss.change:.4g} with every head of {format.name} in 16 bits",
            "a larger --target-ppl-increase, or a longer --calibrate text, if the error is of its size",
        )
    name = f"{format.name} widened" if reached.layers else format.name
    return Choice(replace(reached.format, name=name), outer, scales, tuple(layers), reached.layers)


def compare_formats(
    lm: LanguageModel,
    plan: Plan,
    choice: Choice,
    specs: Sequence[str],
    batch: int | None,
    seed: int,
    bars: Bars,
) -> list[FormatReport]:
    """Measure fp32, each format of `specs` as recommended for this model, and the chosen one."""
    models = {spec: _as_recommended(lm, choice.measured, spec, seed) for spec in specs if spec != "fp32"}
    columns = choice.measured.columns if choice.outer else None
    models[choice.format.name] = lm.with_state(choice.format, columns)
    with bars(plan.predictions, "comparing") as advance:
        losses = measure_losses([*models.values()], lm, plan, lambda tokens, nll: advance(tokens))
    reports = []
    with bars(2 * TIMED_RUNS * (1 + len(models)), "timing") as advance:
        for name, model, loss in zip(("fp32", *models), (lm, *models.values()), (None, *losses), strict=True):
            cost = measure_cost(model, batch, lambda amount, label=None: advance(amount))
            reports.append(FormatReport(name, name == choice.format.name, cost, loss))
    return reports


def _first_format(lm: LanguageModel, scales: Scales, request: Request) -> tuple[StateFormat, bool]:
    """Return the format that the request means before anything is widened, and whether it has columns."""
    if request.recipe is not None:
        return read_recipe(request.recipe, lm.config)
    return _recommended(lm, scales, request.state_dtype, request.seed)


def _as_recommended(lm: LanguageModel, scales: Scales, spec: str, seed: int) -> LanguageModel:
    """Return the model as --state-dtype makes it, but for half-lives and columns measured on the text."""
    if parse_state_spec(spec).plain is not None:
        return lm.with_state(spec)
    format, outer = _recommended(lm, scales, spec, seed)
    return lm.with_state(format, scales.columns if outer else None)


def _recommended(lm: LanguageModel, scales: Scales, spec: str, seed: int) -> tuple[StateFormat, bool]:
    parsed = parse_state_spec(spec)
    return recommended_format(lm.config, scales.half_lives, parsed, seed), parsed.outer


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
