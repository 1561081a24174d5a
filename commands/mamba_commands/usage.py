"""Wrong usage in the form of all errors: what Typer lets through, and what it says too little of."""

import re
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperCommand

from mamba_commands.options import LARGEST_COUNT

# Typer carries its own Click, whose usage error has no public name of its own.
UsageError: Any = typer.BadParameter.__base__

# Parameters of which nothing at all is a value: no text to begin with, no formats beside the chosen one.
MAY_BE_EMPTY = ("prompt", "compare")

# Parameters whose numbers count nothing.
MAY_BE_LARGE = ("seed",)

# Where a word was meant to be that stands alone on the command line: often the shell split a text at blanks.
PLACES_OF_WORDS = {"--prompt": "a text in quotes after --prompt", "--model": "a model after --model"}

NOT_ONE_OF = re.compile(r"""(['"])(?P<value>.*)\1 is not one of (?P<choices>'.*')""")
EXPECTED_NUMBERS = {
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number of fewer digits",
    "float_parsing": "a number",
    "greater_than_equal": "a number from {ge}",
    "less_than_equal": "a number up to {le}",
}


class CheckedCommand(TyperCommand):
    """A command that refuses what Typer lets through, or says too little of, in the form of all errors.

    Empty values, which an unset variable of a shell leaves: as the name of a file or a model one would be
    the current folder. Numbers that nobody means, on which torch would fail in its own words, perhaps after
    hours. Words that follow no option.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        parameters = self.get_params(ctx)
        values, *_ = self.make_parser(ctx).parse_args(args=list(args))
        for parameter in parameters:
            if values.get(parameter.name) == "" and parameter.name not in MAY_BE_EMPTY:
                raise typer.BadParameter(f"{_spelling(parameter)}: expected a value, got an empty one")
        ctx.allow_extra_args = True  # to be refused below, after a --help among them was heard
        if words := super().parse_args(ctx, args):
            raise typer.BadParameter(f"{ctx.info_name}: {_place_of_words(parameters, words)}")
        for parameter in parameters:
            value = ctx.params.get(parameter.name)
            if type(value) is int and value > LARGEST_COUNT and parameter.name not in MAY_BE_LARGE:
                expected = f"a number up to {LARGEST_COUNT}"
                raise typer.BadParameter(f"{_spelling(parameter)}: expected {expected}, got {value}")
        return words


def usage_message(error: Any) -> str:
    """Return what a UsageError says, in the form of all errors where Typer says enough for it."""
    if isinstance(error, typer.BadParameter) and (error.param is None or ": expected " in error.message):
        return error.message  # raised by a command, or by an option of ours, in the form of all messages
    if found := _refused_value(error):
        expected, value = found
        return f"{_spelling(error.param)}: expected {expected}, got {value}"
    # Typer begins with a capital, spreads choices over several lines, and may end with a full stop.
    message = " ".join(error.format_message().split()).removesuffix(".").replace(". Choose from:", ", one of")
    return message[:1].lower() + message[1:]


def _spelling(parameter: Any) -> str:
    """Return what a user writes for an option, or reads for an argument."""
    is_option = parameter.param_type_name == "option"
    return max(parameter.opts, key=len) if is_option else parameter.metavar


def _place_of_words(parameters: Sequence[Any], words: list[str]) -> str:
    """Say what a command takes besides its options, and where words that it does not take belong."""
    arguments = [one.metavar for one in parameters if one.param_type_name == "argument"]
    options = {spelling for one in parameters for spelling in one.opts}
    expected = ["only " + " and ".join(arguments)] if arguments else []
    expected += [place for option, place in PLACES_OF_WORDS.items() if option in options]
    also = "also " if arguments else ""
    got = " ".join(word or "an empty word" for word in words)
    return f"expected {', or '.join(expected) or 'only options'}, got {also}{got}"


def _refused_value(error: Any) -> tuple[str, str] | None:
    """Return what an option wanted and what it was given; None where Typer does not say.

    A choice is in the message; of numbers Typer hands on what pydantic, which it checks them with, found
    (a ValidationError, https://docs.pydantic.dev/latest/errors/validation_errors), and shows no value.
    """
    if choice := NOT_ONE_OF.search(str(error)):
        return "one of " + choice["choices"].replace("'", ""), choice["value"]
    if not hasattr(error.__cause__, "errors"):
        return None
    found = error.__cause__.errors()[0]
    expected = EXPECTED_NUMBERS.get(found["type"])
    return expected and (expected.format(**found.get("ctx", {})), found["input"])
