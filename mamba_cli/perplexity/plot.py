"""The picture of perplexity against position, by matplotlib from the `plot` extra."""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mamba_cli.errors import Mamba2Error
from mamba_cli.perplexity.report import Position

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")


def check_plot(path: Path) -> None:
    """Raise Mamba2Error where plotting to `path` could only fail; called before the long measurement."""
    if path.suffix.lower() not in SUFFIXES:
        raise Mamba2Error(f"plot: expected a file name in {' or '.join(SUFFIXES)}, got {path}")
    if not path.parent.is_dir():
        raise Mamba2Error(f"plot: expected an existing folder, got {path.parent}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise Mamba2Error("plot: expected matplotlib, got none", hint="pip install matplotlib") from None


def plot_positions(positions: Sequence[Position], path: Path, title: str) -> None:
    """Draw perplexity by tokens read, both axes in powers, the reference's beside where there is one."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    middles = [math.sqrt(position.first * position.last) for position in positions]
    axes.plot(middles, [position.perplexity for position in positions], marker="o", label="model")
    references = [position.reference_perplexity for position in positions]
    if references[0] is not None:
        axes.plot(middles, references, marker="s", linestyle="--", label="reference")
        axes.legend()
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("tokens read")
    axes.set_ylabel("perplexity")
    # A file's name is no formula.
    axes.set_title(title, parse_math=False)
    axes.grid(alpha=0.3, which="both")
    save_figure(figure, path)


def save_figure(figure: "Figure", path: Path) -> None:
    """Write a figure in one piece: an interrupted run leaves no half a picture."""
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        figure.savefig(temporary, dpi=150)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
