"""mamba_commands.output: what goes to which stream, on a terminal and in a pipe."""

import io
import json
import sys

import pytest

from mamba_commands.output import Output, say_error

COLUMNS = ("name", "rows", "share")
ROWS = [("conv1d [/INST]", 5376, 0.25), ("中文", 7, 12.5), ("with\ttab\nand line", 1234567, "-")]


class Stream(io.StringIO):
    """A stream that a person watches, or not."""

    encoding = "utf-8"

    def __init__(self, terminal: bool):
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.fixture
def streams(monkeypatch):
    def replace(terminal: bool) -> tuple[Stream, Stream]:
        streams = Stream(terminal), Stream(terminal)
        monkeypatch.setattr(sys, "stdout", streams[0])
        monkeypatch.setattr(sys, "stderr", streams[1])
        return streams

    return replace


def test_a_piped_table_is_tab_separated_lines(streams):
    stdout, stderr = streams(terminal=False)
    Output().table(COLUMNS, ROWS)
    assert stdout.getvalue() == (
        "name\trows\tshare\nconv1d [/INST]\t5376\t0.25\n中文\t7\t12.5\nwith\\ttab\\nand line\t1234567\t-\n"
    )
    assert stderr.getvalue() == ""


def test_a_table_on_a_terminal_is_aligned_with_numbers_to_the_right(streams):
    stdout, _ = streams(terminal=True)
    Output().table(COLUMNS, ROWS)
    assert stdout.getvalue() == (
        "name                    rows  share\n"
        "conv1d [/INST]          5376  0.25\n"
        "中文                       7  12.5\n"
        "with\\ttab\\nand line  1234567  -\n"
    )


def test_a_table_is_never_cut_or_wrapped(streams, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    for terminal in (True, False):
        stdout, _ = streams(terminal)
        Output().table(("a", "b"), [("x" * 200, "y" * 200)])
        assert len(stdout.getvalue().splitlines()) == 2
        assert "x" * 200 in stdout.getvalue() and "y" * 200 in stdout.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_a_table_without_rows_is_its_columns(streams, terminal):
    stdout, _ = streams(terminal)
    Output().table(("a", "b"), [])
    assert stdout.getvalue().split() == ["a", "b"]


def test_data_is_written_as_it_is(streams):
    stdout, _ = streams(terminal=True)
    text = "[/INST] [bold]x[/bold] :smile: \x1b[0m " + "long " * 100
    Output().data(text, end="")
    assert stdout.getvalue() == text


def test_json_is_strict_and_keeps_characters(streams):
    stdout, _ = streams(terminal=False)
    Output().json({"text": "é🙂", "none": None})
    assert json.loads(stdout.getvalue()) == {"text": "é🙂", "none": None}
    assert "é🙂" in stdout.getvalue()
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError):
            Output().json({"value": value})


@pytest.mark.parametrize(
    ("out", "expected"),
    [
        (Output(), "note\nhint: hint\nwarning: warning\n"),
        (Output(quiet=True), "warning: warning\n"),
        (Output(verbose=True), "note\ndetail\nhint: hint\nwarning: warning\n"),
    ],
)
def test_what_is_said_on_stderr(streams, out, expected):
    stdout, stderr = streams(terminal=False)
    out.note("note")
    out.detail("detail")
    out.hint("hint")
    out.warning("warning")
    assert (stdout.getvalue(), stderr.getvalue()) == ("", expected)


@pytest.mark.parametrize(("terminal", "quiet"), [(True, False), (True, True), (False, False)])
def test_progress_moves_only_on_a_terminal_and_only_on_stderr(streams, terminal, quiet, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stdout, stderr = streams(terminal)
    with Output(quiet).progress(10, "Reading [x]") as advance:
        advance(4)
        advance(6)
    assert stdout.getvalue() == ""
    assert ("Reading [x]" in stderr.getvalue()) == (terminal and not quiet)


def test_names_from_a_checkpoint_can_neither_steer_the_terminal_nor_add_lines(streams):
    stdout, stderr = streams(terminal=True)
    say_error("\x1b[2Jname\nerror: another: got 1", "\x9b31m\r")
    Output().note("\x07bell")
    Output().table(("name",), [("\x1b]0;title\x07",)])
    assert stderr.getvalue() == (
        "error: \\x1b[2Jname\\nerror: another: got 1\nhint: \\x9b31m\\x0d\n\\x07bell\n"
    )
    assert stdout.getvalue() == "name\n\\x1b]0;title\\x07\n"
