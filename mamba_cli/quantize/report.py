"""What a state format costs and what it loses: bytes, speed, and predictions beside the fp32 state's."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mamba_cli.bench import measure
from mamba_cli.language_model import LanguageModel
from mamba_cli.machine import free_memory
from mamba_cli.perplexity.compare import compare
from mamba_cli.perplexity.evaluate import Progress, Scores, evaluate_each
from mamba_cli.perplexity.plan import Plan
from mamba_cli.perplexity.statistics import exact_sum, perplexity

# Predictions made after 1 to this many tokens are the first of the positions; each next is twice as far.
FIRST_POSITIONS = 64
# Sequences that decoding is timed with, and how: steps of a run after a prompt, and runs.
DECODE_BATCH = {"cpu": 1, "cuda": 64}
TIMED_STEPS = {"cpu": 16, "cuda": 64}
TIMED_PROMPT = 16
TIMED_RUNS = 3


@dataclass(frozen=True)
class Position:
    """Means over the predictions made after reading `first` to `last` tokens.

    nll_change: of the absolute change of the token's NLL; kl: KL(fp32 || this), both in nats.
    """

    first: int
    last: int
    tokens: int
    nll_change: float
    kl: float


@dataclass(frozen=True)
class Loss:
    """The predictions of one format beside those of the fp32 state, token by token in steps.

    change: of the perplexity, as a share of fp32's; its standard error comes from the differences token
    by token, and is None where one window leaves nothing to estimate it from. kl in nats; same_top: share
    of the predictions with the same most probable token; nll_change: mean absolute change of a token's
    NLL. growth: the power of the position that nll_change grows with (0 does not, 0.5 as noise that adds
    up, 1 as drift), None where there is nothing to fit.
    """

    perplexity: float
    change: float
    change_stderr: float | None
    kl: float
    same_top: float
    nll_change: float
    positions: tuple[Position, ...]
    growth: float | None


@dataclass(frozen=True)
class Cost:
    """state_bytes: of one sequence, as allocated; sequences: that the free memory holds; None if unknown.

    milliseconds: of one decode step of `batch` sequences.
    """

    state_bytes: int
    sequences: int | None
    batch: int
    milliseconds: float


@dataclass(frozen=True)
class FormatReport:
    """One format: `name` as the user calls it, whether it is the one chosen; loss None for fp32 itself."""

    name: str
    chosen: bool
    cost: Cost
    loss: Loss | None


def measure_losses(
    models: Sequence[LanguageModel],
    reference: LanguageModel,
    plan: Plan,
    progress: Progress | None = None,
) -> list[Loss]:
    """Score models, that differ from the reference in the format of their state, in one pass."""
    if not models:
        return []
    found = evaluate_each(models, plan, reference=reference, progress=progress)
    return [loss(scores, plan) for scores in found]


def loss(scores: Scores, plan: Plan) -> Loss:
    """Summarise the scores of one format."""
    compared = compare(scores, plan)
    change = math.expm1(min(compared.nll_difference, 700.0))
    stderr = compared.nll_difference_stderr
    positions = by_position(scores, plan)
    return Loss(
        perplexity=perplexity(exact_sum(scores.nll) / plan.predictions),
        change=change,
        change_stderr=None if stderr is None else (1 + change) * stderr,
        kl=compared.kl_mean,
        same_top=compared.same_top,
        nll_change=compared.nll_change,
        positions=positions,
        growth=growth(positions),
    )


def by_position(scores: Scores, plan: Plan) -> tuple[Position, ...]:
    """Average the errors by tokens read: 1 to 64, 65 to 128, 129 to 256 and so on; no part is empty."""
    lengths = torch.cat([torch.arange(context.start, context.stop) for context in plan.contexts])
    parts = ((lengths - 1).double() / FIRST_POSITIONS).clamp(min=0.5).log2().floor().long() + 1
    change = (scores.nll - scores.reference_nll).abs()
    positions = []
    for part in parts.unique().tolist():
        inside = parts == part
        count = int(inside.sum())
        positions.append(
            Position(
                first=FIRST_POSITIONS * 2 ** (part - 1) + 1 if part else 1,
                last=FIRST_POSITIONS * 2**part,
                tokens=count,
                nll_change=exact_sum(change[inside]) / count,
                kl=exact_sum(scores.kl[inside]) / count,
            )
        )
    return tuple(positions)


def growth(positions: Sequence[Position]) -> float | None:
    """Return the slope of log(nll_change) over log(position), each weighted by its tokens."""
    points = [position for position in positions if 0 < position.nll_change < math.inf]
    if len(points) < 2:
        return None
    weights = [position.tokens for position in points]
    x = [math.log(math.sqrt(position.first * position.last)) for position in points]
    y = [math.log(position.nll_change) for position in points]
    total = sum(weights)
    x_mean = sum(w * a for w, a in zip(weights, x, strict=True)) / total
    y_mean = sum(w * b for w, b in zip(weights, y, strict=True)) / total
    products = sum(w * (a - x_mean) * (b - y_mean) for w, a, b in zip(weights, x, y, strict=True))
    return products / sum(w * (a - x_mean) ** 2 for w, a in zip(weights, x, strict=True))


def measure_cost(
    lm: LanguageModel,
    batch: int | None = None,
    advance: Callable[..., None] = lambda amount, label=None: None,
) -> Cost:
    """Measure what a model's state takes; batch None for the device's DECODE_BATCH."""
    device = lm.device.type
    batch = batch or DECODE_BATCH[device]
    nbytes = state_bytes(lm, batch)
    free = free_memory(lm.device)
    *_, decode = measure(lm, [batch], [TIMED_PROMPT], [TIMED_STEPS[device]], TIMED_RUNS, advance)
    return Cost(
        state_bytes=nbytes,
        sequences=None if free is None else free // nbytes,
        batch=batch,
        milliseconds=1e3 * statistics.median(decode.seconds) / TIMED_STEPS[device],
    )


def state_bytes(lm: LanguageModel, batch: int) -> int:
    """Return the bytes that a state of `batch` sequences holds, a sequence, rounded up.

    What the allocator gave: on a GPU the growth of what it counts as in use, else the storages of the
    state's tensors, each once.
    """
    if lm.device.type == "cuda":
        before = torch.cuda.memory_allocated(lm.device)
        state = lm.init_state(batch)
        return -((before - torch.cuda.memory_allocated(lm.device)) // batch)
    state = lm.init_state(batch)
    storages = [tensor.untyped_storage() for layer in state.layers for tensor in layer.tensors()]
    return -(-sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()) // batch)
