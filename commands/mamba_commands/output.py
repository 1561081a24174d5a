"""What a command prints: data to stdout, everything said about it to stderr.

Nothing passes through rich markup, nothing is cut to a width, and without a terminal nothing moves.
"""

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mamba_cli.errors import Mamba2Error

# Characters that a terminal obeys instead of showing them, but for the tab and the newline.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True)
class Output:
    """The two streams of a command. quiet drops notes, hints and progress; verbose adds details."""

    quiet: bool = False
    verbose: bool = False

    def __post_init__(self) -> None:
        # Said to the libraries in the way they read when they are imported, which is later.
        if not self.verbose:
            os.environ.setdefault("HF_HUB_VERBOSITY", "error")
            os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        if self.quiet or not is_terminal(sys.stderr):
            os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

    def data(self, text: str, end: str = "\n") -> None:
        """Write `text` to stdout at once, as it is."""
        try:
            sys.stdout.write(text + end)
            sys.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise Mamba2Error(f"standard output: {error.strerror or error}") from error

    def json(self, document: Any) -> None:
        """Write one strict JSON document to stdout: a NaN or an infinity is a ValueError."""
        self.data(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False))

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Write a table to stdout: aligned on a terminal, tab-separated lines when piped.

        The first line holds the columns' names. Numbers are written by str() and stand to the right.
        """
        cells = [[_one_line(cell) for cell in row] for row in (columns, *rows)]
        if not sys.stdout.isatty():
            self.data("\n".join("\t".join(line) for line in cells))
            return
        from rich.cells import cell_len

        widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
        to_the_right = [
            bool(rows) and all(isinstance(row[index], int | float) for row in rows)
            for index in range(len(columns))
        ]
        for line in cells:
            padded = (
                " " * (width - cell_len(cell)) + cell if right else cell + " " * (width - cell_len(cell))
                for cell, width, right in zip(line, widths, to_the_right, strict=True)
            )
            self.data("  ".join(padded).rstrip())

    def note(self, text: str) -> None:
        """Say on stderr what happened or will happen; silent when quiet."""
        if not self.quiet:
            say(text)

    def detail(self, text: str) -> None:
        """Say on stderr what only a curious reader asks for with --verbose."""
        if self.verbose:
            say(text)

    def hint(self, text: str) -> None:
        """Name the next step on stderr; silent when quiet."""
        self.note(f"hint: {text}")

    def warning(self, text: str) -> None:
        """Warn on stderr, also when quiet."""
        say(f"warning: {text}")

    @contextlib.contextmanager
    def progress(self, total: float | None, label: str) -> Iterator[Callable[..., None]]:
        """Show a progress bar on stderr inside the block and yield `advance(amount, label=None)`.

        total None means an unknown end; a label given on the way replaces the one before. There is no
        bar when quiet or when stderr is not a terminal.
        """
        if self.quiet or not is_terminal(sys.stderr):
            yield lambda amount, label=None: None
            return
        from rich.console import Console
        from rich.markup import escape
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(escape(label), total=total)

            def advance(amount: float, label: str | None = None) -> None:
                bar.update(task, advance=amount, description=None if label is None else escape(label))

            yield advance


def is_terminal(stream: Any) -> bool:
    """Whether a person watches `stream`."""
    return bool(stream is not None and stream.isatty())


def say(text: str) -> None:
    """Write to stderr; what a checkpoint put into `text` cannot steer a terminal."""
    print(_CONTROL.sub(_escape, text), file=sys.stderr, flush=True)


def say_error(message: str, hint: str | None = None) -> None:
    """Report a failure on stderr: a line `error: ...`, and `hint: ...` where there is a next step."""
    say(f"error: {_one_line(message)}")
    if hint:
        say(f"hint: {_one_line(hint)}")


def prepare_streams() -> None:
    """Make stdout and stderr writable whatever the environment: UTF-8, and somewhere even if closed."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # started with the descriptor closed, as by `>&-`
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
        elif hasattr(stream, "reconfigure"):
            # A file name that is not UTF-8 goes out as the bytes it came in with.
            stream.reconfigure(encoding="utf-8", errors="surrogateescape")


def release_streams() -> None:
    """Flush both streams, and give up what cannot be written.

    The interpreter flushes once more as it shuts down and would report a closed pipe there.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)


def _one_line(cell: object) -> str:
    text = str(cell).replace("\t", "\\t").replace("\n", "\\n")
    return _CONTROL.sub(_escape, text)


def _escape(control: re.Match[str]) -> str:
    return f"\\x{ord(control[0]):02x}"
