"""The picture of error against position, one line a format, by matplotlib from the `plot` extra."""

import math
from collections.abc import Sequence
from pathlib import Path

from mamba_cli.perplexity.plot import save_figure
from mamba_cli.quantize.report import FormatReport


def plot_errors(formats: Sequence[FormatReport], path: Path, title: str) -> None:
    """Draw the mean change of a token's NLL, and the KL divergence, by tokens read; all axes in powers."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    for axes, field, label in zip(
        figure.subplots(1, 2),
        ("nll_change", "kl"),
        ("mean change of a token's NLL, nats", "KL(fp32 || format), nats"),
        strict=True,
    ):
        for report in formats:
            if report.loss is None:
                continue
            points = [each for each in report.loss.positions if getattr(each, field) > 0]
            axes.plot(
                [math.sqrt(each.first * each.last) for each in points],
                [getattr(each, field) for each in points],
                marker="o",
                linewidth=2.5 if report.chosen else 1.2,
                label=f"{report.name} (chosen)" if report.chosen else report.name,
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("tokens read")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3, which="both")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=6)
    # A file's name is no formula.
    figure.suptitle(title, parse_math=False)
    save_figure(figure, path)
