"""From the NLL of each prediction to the figures that are reported. Pure arithmetic in float64.

NLLs are in nats. Sums are exact (math.fsum), so they depend on no order: one process or several, one
run or a resumed one give the same number.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch


def exact_sum(values: torch.Tensor) -> float:
    """Return the correctly rounded sum of a float tensor; infinite where a value is."""
    if not torch.isfinite(values).all():
        return float(values.sum())
    return math.fsum(value for piece in values.split(1 << 16) for value in piece.tolist())


def perplexity(nll: float) -> float:
    """Return exp(nll); infinite where that passes the largest float."""
    try:
        return math.exp(nll)
    except OverflowError:
        return math.inf


def standard_error(values: torch.Tensor, blocks: Sequence[int]) -> float | None:
    """Return the standard error of the mean of `values`, cut into consecutive blocks of these sizes.

    Neighbouring tokens are correlated, so the blocks (windows, or chunks of a carried pass) are the
    independent units. The mean is the ratio of sums S_b to sizes n_b, whose variance to first order is
        B / (B - 1) * sum_b (S_b - mean n_b)^2 / (sum_b n_b)^2
    (the linearised ratio estimator: Cochran, Sampling Techniques, 3rd ed., section 6.3). None below two
    blocks or where a value is infinite: there is nothing to estimate it from.
    """
    if len(blocks) < 2 or not torch.isfinite(values).all():
        return None
    total = len(values)
    mean = exact_sum(values) / total
    sums = (exact_sum(block) for block in values.split(list(blocks)))
    squares = math.fsum((s - mean * n) ** 2 for s, n in zip(sums, blocks, strict=True))
    return math.sqrt(len(blocks) / (len(blocks) - 1) * squares) / total


def count_words(documents: Iterable[str]) -> int:
    """Count words by lm-evaluation-harness's WikiText rule, document by document.

    The harness splits the original page, before any detokenisation, at runs of white space
    (lm_eval/tasks/wikitext/preprocess_wikitext.py), so white space at either end of a page counts
    one empty word. Its word perplexity is exp(sum of NLL / this count).
    """
    return sum(len(re.split(r"\s+", document)) for document in documents)


@dataclass(frozen=True)
class Bucket:
    """The mean over `tokens` predictions that were made after reading `first` to `last` tokens."""

    first: int
    last: int
    tokens: int
    mean: float


def by_context(values: torch.Tensor, contexts: Sequence[range]) -> list[Bucket]:
    """Average `values` by context length in powers of two: 1, 2-3, 4-7, and so on; no bucket is empty.

    contexts: consecutive values' context lengths, run by run, as windows.context_lengths gives them.
    """
    lengths = torch.cat([torch.arange(context.start, context.stop) for context in contexts])
    exponents = torch.frexp(lengths.double()).exponent - 1  # floor(log2), exactly
    buckets = []
    for exponent in exponents.unique().tolist():
        inside = values[exponents == exponent]
        mean = exact_sum(inside) / len(inside)
        buckets.append(Bucket(2**exponent, 2 ** (exponent + 1) - 1, len(inside), mean))
    return buckets


def percentiles(values: torch.Tensor, points: Sequence[float]) -> list[float]:
    """Return percentiles (0 to 100) of `values`, interpolated linearly between neighbours."""
    ordered = values.sort().values
    result = []
    for point in points:
        place = point / 100 * (len(ordered) - 1)
        low = math.floor(place)
        high = min(low + 1, len(ordered) - 1)
        left, right = ordered[low].item(), ordered[high].item()
        fraction = place - low
        result.append(left if fraction == 0 else left + (right - left) * fraction)
    return result
