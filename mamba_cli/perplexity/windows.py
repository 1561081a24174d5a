"""The plan of a measurement: which tokens the model reads together, and which predictions count.

A document of n tokens offers n - 1 predictions: reading token p predicts token p + 1. A window reads
up to `window` tokens at once. Windows begin every `stride` tokens, and a prediction counts in the
first window that makes it, so each of the n - 1 counts exactly once whatever window and stride are.
With stride = window the windows' inputs are disjoint and each window's last target is the next one's
first input: one token of overlap. These are lm-evaluation-harness's rolling windows with a context of
one token (lm_eval/utils.py, get_rolling_token_windows). stride < window is the strided evaluation of
the transformers documentation ("Perplexity of fixed-length models") with `window` counting the tokens
read; its own count includes the last target, and so its windows skip a prediction when stride = window.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from mamba_cli.errors import Mamba2Error

DEFAULT_WINDOW = 2048


@dataclass(frozen=True, slots=True)
class Window:
    """The model reads tokens [start, stop) of a document; predictions from [scored, stop) count."""

    document: int
    start: int
    stop: int
    scored: int

    @property
    def length(self) -> int:
        """Tokens read."""
        return self.stop - self.start

    @property
    def predictions(self) -> int:
        """Predictions that count."""
        return self.stop - self.scored


def plan_windows(lengths: Sequence[int], window: int | None, stride: int | None = None) -> list[Window]:
    """Return the windows of documents of `lengths` tokens (prefix token included), in reading order.

    window None reads each document at once. Documents of fewer than two tokens have no window.
    """
    if window is not None and window < 1:
        raise Mamba2Error(f"window: expected at least 1 token, got {window}")
    if stride is not None and not 1 <= stride <= (window or stride):
        raise Mamba2Error(f"stride: expected 1 to the window's {window} tokens, got {stride}")
    windows = []
    for document, length in enumerate(lengths):
        last = length - 1
        size = last if window is None else window
        step = size if stride is None else stride
        start = scored = 0
        while scored < last:
            stop = min(start + size, last)
            windows.append(Window(document, start, stop, scored))
            start, scored = start + step, stop
    return windows


def offsets(windows: Sequence[Window]) -> list[int]:
    """Return where each window's predictions begin among all predictions, and at the end their number."""
    return list(accumulate((window.predictions for window in windows), initial=0))


def pack_batches(windows: Sequence[Window], batch_size: int) -> list[list[int]]:
    """Return indices of windows, `batch_size` to a batch.

    Windows of one length go together, so little is spent on padding, and the longest go first, so
    that a batch that does not fit the memory shows itself at once. The batches depend on nothing but
    the plan: an interrupted or distributed run computes the very same ones.
    """
    if batch_size < 1:
        raise Mamba2Error(f"batch size: expected at least 1, got {batch_size}")
    order = sorted(range(len(windows)), key=lambda index: -windows[index].length)
    return [order[first : first + batch_size] for first in range(0, len(order), batch_size)]


def context_lengths(windows: Sequence[Window]) -> list[range]:
    """Return for each window the number of tokens read when each counted prediction is made."""
    return [range(w.scored - w.start + 1, w.length + 1) for w in windows]
