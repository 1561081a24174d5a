"""What is measured: the documents, as far as they are read, and the predictions made on them."""

from collections.abc import Sequence
from dataclasses import dataclass

from mamba_cli.errors import Mamba2Error
from mamba_cli.perplexity.tokens import Document, TokenizerLike, cut_to_windows
from mamba_cli.perplexity.windows import DEFAULT_WINDOW, Window, context_lengths, plan_windows

MODES = ("window", "carry", "step")


@dataclass(frozen=True)
class Plan:
    """Which predictions are made and how.

    windows: what the model reads from an empty state; in mode "carry" whole documents, read in chunks
    of `window` tokens. blocks: sizes of the runs of predictions that the standard error treats as
    independent: the windows, or the chunks of a carried document.
    """

    documents: list[Document]
    mode: str
    window: int
    stride: int
    windows: list[Window]
    blocks: list[int]

    @property
    def predictions(self) -> int:
        return sum(self.blocks)

    @property
    def contexts(self) -> list[range]:
        """Tokens read when each prediction is made, window by window."""
        return context_lengths(self.windows)


def make_plan(
    documents: Sequence[Document],
    tokenizer: TokenizerLike,
    mode: str = "window",
    window: int = DEFAULT_WINDOW,
    stride: int | None = None,
    max_windows: int | None = None,
    title: str = "text",
) -> Plan:
    """Plan the measurement of `documents`; what the windows do not reach is cut off.

    mode: "window" and "step" score rolling windows, "carry" whole documents. stride: default `window`.
    max_windows: only the first so many windows, or chunks. title: what an error calls the text.
    """
    if mode not in MODES:
        raise Mamba2Error(f"mode: expected {', '.join(MODES)}, got {mode}")
    if mode == "carry" and stride not in (None, window):
        raise Mamba2Error(f"stride: expected none in mode carry, which reads every token once, got {stride}")
    if max_windows is not None and max_windows < 1:
        raise Mamba2Error(f"max-windows: expected at least 1, got {max_windows}")
    stride = window if stride is None else stride
    reach = plan_windows([len(document.ids) for document in documents], window, stride)[:max_windows]
    kept = cut_to_windows(documents, reach, tokenizer)
    if not kept:
        longest = max((len(document.ids) for document in documents), default=0)
        found = f"at most {longest} in each document" if len(documents) > 1 else str(longest)
        raise Mamba2Error(
            f"{title}: expected at least 2 tokens, one to read and one to predict, got {found}",
            hint="--prefix bos or eos makes a single token predictable" if longest else None,
        )
    lengths = [len(document.ids) for document in kept]
    blocks = plan_windows(lengths, window, stride)
    windows = plan_windows(lengths, None) if mode == "carry" else blocks
    return Plan(kept, mode, window, stride, windows, [block.predictions for block in blocks])
