"""The result of a measurement as one document: the figures, and everything that defines them."""

import math
from dataclasses import dataclass, replace
from typing import Any

from mamba_cli.perplexity.evaluate import Scores
from mamba_cli.perplexity.plan import Plan
from mamba_cli.perplexity.statistics import by_context, exact_sum, perplexity, standard_error
from mamba_cli.perplexity.tokens import Extent

# How the standard errors are made, by mode.
STDERR_METHODS = {
    "window": "delta method over windows",
    "step": "delta method over windows",
    "carry": "delta method over chunks of the window's length",
}


@dataclass(frozen=True)
class Figures:
    """nll_* in nats per token; perplexity_stderr = perplexity * nll_stderr (the delta method).

    stderr fields are None where one window, or an infinite value, leaves nothing to estimate them from.
    """

    tokens: int
    nll_sum: float
    nll_mean: float
    nll_stderr: float | None
    perplexity: float
    perplexity_stderr: float | None
    bits_per_byte: float | None
    byte_perplexity: float | None
    word_perplexity: float | None


def summarise(scores: Scores, plan: Plan, extent: Extent) -> Figures:
    """Turn NLLs into the figures that are reported."""
    tokens = plan.predictions
    nll_sum = exact_sum(scores.nll)
    nll_mean = nll_sum / tokens
    stderr = standard_error(scores.nll, plan.blocks)
    per_byte = nll_sum / extent.bytes if extent.bytes else None
    return Figures(
        tokens=tokens,
        nll_sum=nll_sum,
        nll_mean=nll_mean,
        nll_stderr=stderr,
        perplexity=perplexity(nll_mean),
        perplexity_stderr=None if stderr is None else perplexity(nll_mean) * stderr,
        bits_per_byte=None if per_byte is None else per_byte / math.log(2),
        byte_perplexity=None if per_byte is None else perplexity(per_byte),
        word_perplexity=perplexity(nll_sum / extent.words) if extent.words else None,
    )


@dataclass(frozen=True)
class Position:
    """Figures of the predictions made after reading `first` to `last` tokens."""

    first: int
    last: int
    tokens: int
    nll_mean: float
    perplexity: float
    reference_perplexity: float | None = None
    kl_mean: float | None = None


def measure_by_position(scores: Scores, plan: Plan) -> list[Position]:
    """Return the figures by context length, in powers of two."""
    rows = [
        Position(bucket.first, bucket.last, bucket.tokens, bucket.mean, perplexity(bucket.mean))
        for bucket in by_context(scores.nll, plan.contexts)
    ]
    if scores.reference_nll is None or scores.kl is None:
        return rows
    reference, kl = by_context(scores.reference_nll, plan.contexts), by_context(scores.kl, plan.contexts)
    return [
        replace(row, reference_perplexity=perplexity(theirs.mean), kl_mean=divergence.mean)
        for row, theirs, divergence in zip(rows, reference, kl, strict=True)
    ]


def strict(value: Any) -> Any:
    """Return `value` as strict JSON can hold it: keys as strings, numbers that are not finite as None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        # Percentiles' keys are floats.
        return {f"{key:g}" if isinstance(key, float) else key: strict(item) for key, item in value.items()}
    return [strict(item) for item in value] if isinstance(value, list | tuple) else value
