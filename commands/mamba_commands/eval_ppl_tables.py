"""The tables of `mamba2 eval-ppl`: figures, what a reference says beside them, and tokens read."""

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mamba_commands.output import Output, is_terminal

if TYPE_CHECKING:
    from mamba_cli.perplexity.compare import Comparison
    from mamba_cli.perplexity.report import Figures, Position

BAR_WIDTH = 40


def print_figures(out: Output, figures: "Figures") -> None:
    rows = [
        ("perplexity", _number(figures.perplexity), _error(figures.perplexity_stderr)),
        ("nll/token", _number(figures.nll_mean), _error(figures.nll_stderr)),
        ("nll sum", _number(figures.nll_sum), ""),
        ("tokens", figures.tokens, ""),
        ("bits/byte", _number(figures.bits_per_byte), ""),
        ("word perplexity", _number(figures.word_perplexity), ""),
    ]
    out.table(("figure", "value", "+-"), rows)


def print_comparison(out: Output, comparison: "Comparison", reference: str) -> None:
    c = comparison
    rows = [
        ("perplexity", _number(c.perplexity), ""),
        ("nll difference", _number(c.nll_difference), _error(c.nll_difference_stderr)),
        ("mean change of nll", _number(c.nll_change), ""),
        ("KL mean", _number(c.kl_mean), _error(c.kl_stderr)),
        *((f"KL {_percent(point)}", _number(value), "") for point, value in c.kl_percentiles.items()),
        ("p(token) mean change", _number(c.probability_change_mean), ""),
        ("p(token) rms change", _number(c.probability_change_rms), ""),
        *(
            (f"p(token) change {_percent(point)}", _number(value), "")
            for point, value in c.probability_change_percentiles.items()
        ),
        ("same top-1", f"{c.same_top:.4%}", ""),
    ]
    out.data("")
    out.table((f"against {reference}", "value", "+-"), rows)


def print_positions(out: Output, positions: "Sequence[Position]") -> None:
    columns = ["tokens read", "scored", "perplexity"]
    rows: list[list[object]] = [
        [f"{position.first}-{position.last}", position.tokens, _number(position.perplexity)]
        for position in positions
    ]
    if positions[0].reference_perplexity is not None:
        columns += ["reference", "KL mean"]
        for row, position in zip(rows, positions, strict=True):
            row += [_number(position.reference_perplexity), _number(position.kl_mean)]
    if is_terminal(sys.stdout):
        columns.append("")
        finite = [position.perplexity for position in positions if math.isfinite(position.perplexity)]
        for row, position in zip(rows, positions, strict=True):
            row.append("█" * round(BAR_WIDTH * min(1.0, position.perplexity / max(finite, default=1.0))))
    out.data("")
    out.table(columns, rows)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def _error(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"


def _percent(point: float) -> str:
    return {0: "least", 50: "median", 100: "greatest"}.get(point, f"{point:g}%")
