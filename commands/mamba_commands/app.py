"""The `mamba2` command: its subcommands, and the one place where failures become exit statuses.

Exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted. A reader that closes the pipe has what
it wanted: that is silent, and 0.
"""

import contextlib
import importlib
import importlib.metadata
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Annotated, NamedTuple

import typer

from mamba_cli.errors import Mamba2Error
from mamba_commands import output
from mamba_commands.usage import CheckedCommand, UsageError, usage_message


class Command(NamedTuple):
    """A subcommand: `function` of mamba_commands.`module`, imported only when it is asked for."""

    name: str
    module: str
    function: str
    summary: str

    def load(self) -> Callable[..., None]:
        """Import the module and return its function. Modules import torch inside functions only."""
        return getattr(importlib.import_module(f"mamba_commands.{self.module}"), self.function)


COMMANDS = (
    Command("generate", "generate", "generate", "Continue a text with a model."),
    Command("convert", "convert", "convert", "Convert a checkpoint to another format."),
    Command("inspect", "inspect", "inspect", "Show what a checkpoint holds."),
    Command("eval-ppl", "eval_ppl", "eval_ppl", "Measure perplexity on a text."),
    Command("quantize-state", "quantize_state", "quantize_state", "Keep the recurrent state in few bits."),
    Command("bench", "bench", "bench", "Measure how fast a model runs here."),
    Command("doctor", "doctor", "doctor", "Check that everything works on this machine."),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (sys.argv without `arguments`) and return the exit status."""
    output.prepare_streams()
    _catch_interrupts()
    arguments = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    word = next((argument for argument in arguments if not argument.startswith("-")), None)
    named = next((command for command in COMMANDS if command.name == word), None)
    try:
        with warnings.catch_warnings():
            _say_warnings_in_one_line()
            return _run(arguments, named)
    except BrokenPipeError:
        return 0
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if os.environ.get("MAMBA2_DEBUG") == "1":
            traceback.print_exc()
        return _report(error, named)
    finally:
        output.release_streams()


def _catch_interrupts() -> None:
    # Whoever chose another handler, or to ignore interrupts as `nohup` does, keeps it.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with contextlib.suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGINT, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, but end at once while torch is being imported.

    Its compiled parts, and numpy's, would swallow the exception, or abort on it. Nothing has been written
    by then that would have to be cleaned up.
    """
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "torch":
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


def _run(arguments: list[str], named: Command | None) -> int:
    # Not app(...): that would turn failures into its own messages and exit statuses.
    command = typer.main.get_command(_app(named))
    try:
        with command.make_context("mamba2", arguments) as context:
            command.invoke(context)
    except typer.Exit as exit:
        return exit.exit_code
    return 0


def _app(named: Command | None) -> typer.Typer:
    """Build the application, importing no command but the one that is named."""
    app = typer.Typer(
        add_completion=False,
        rich_markup_mode=None,  # its tables cut the names of options on a narrow terminal
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for command in COMMANDS:
        function = command.load() if command is named else _not_imported
        app.command(command.name, cls=CheckedCommand, short_help=command.summary)(function)
    return app


def _not_imported() -> None:
    """Stand for a command in the list of commands."""


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    try:
        version = importlib.metadata.version("mamba2")
    except importlib.metadata.PackageNotFoundError:
        version = "(not installed)"
    output.Output().data(f"mamba2 {version}")
    raise typer.Exit()


def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    """Generate text with Mamba-2 checkpoints, convert them, inspect them, measure them."""


def _report(error: Exception, named: Command | None) -> int:
    """Print a failure as one line, a hint where there is one, and return the exit status."""
    if isinstance(error, Mamba2Error):
        output.say_error(error.message, error.hint)
        return 1
    if isinstance(error, UsageError):
        output.say_error(usage_message(error), f"see mamba2 {named.name + ' ' if named else ''}--help")
        return 2
    if isinstance(error, OSError) and error.filename is not None:
        output.say_error(f"{error.filename}: {error.strerror}")
        return 1
    first_line = next(iter(str(error).splitlines()), "")
    if _is_lack_of_memory(error):
        found = first_line.rpartition("DefaultCPUAllocator: ")[2] or "no more"
        output.say_error(
            f"memory: expected enough of it, got: {found}",
            "fewer sequences at once, shorter ones, or a narrower --dtype take less",
        )
        return 1
    hint = "set MAMBA2_DEBUG=1 for the traceback"
    if isinstance(error, ImportError):
        hint = f"mamba2 doctor says which packages work; {hint}"
    output.say_error(f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__, hint)
    return 1


def _is_lack_of_memory(error: Exception) -> bool:
    # Not by torch's type, which would have to be imported; and on a CPU torch raises a mere RuntimeError.
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return bool(kinds & {"MemoryError", "OutOfMemoryError"}) or "DefaultCPUAllocator" in str(error)


def _say_warnings_in_one_line() -> None:
    """Show the toolkit's own warnings as `warning: ...`; other packages' are for their authors."""
    if os.environ.get("MAMBA2_DEBUG") == "1":
        return
    warnings.simplefilter("ignore")
    warnings.filterwarnings("default", module=r"mamba_(kernels|cli|commands)\b")
    warnings.showwarning = lambda message, *_, **__: output.say(f"warning: {message}")


if __name__ == "__main__":
    sys.exit(main())
