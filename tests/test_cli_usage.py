"""What is said of a command line that cannot be meant: options, values and words in the wrong place."""

import importlib.util
import typing

import pytest

from mamba_commands import app


@pytest.mark.parametrize(
    ("arguments", "message", "where"),
    [
        (["--no-such"], "no such option: --no-such", "mamba2"),
        (["no-such"], "no such command 'no-such'", "mamba2"),
        (["generate", "--no-such"], "no such option: --no-such", "mamba2 generate"),
        (["generate", "--seed"], "'--seed'", "mamba2 generate"),
        (["generate", "extra"], "extra", "mamba2 generate"),
        (["convert", "a", "b"], "missing option '--to', one of state-spaces, hf, fla", "mamba2 convert"),
    ],
)
def test_wrong_usage_is_two_lines_and_status_2(capfd, arguments, message, where):
    assert app.main(arguments) == 2
    out, err = capfd.readouterr()
    first, second = err.splitlines()
    assert first.startswith("error: ") and message in first
    assert second == f"hint: see {where} --help"
    assert out == ""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["generate", "-n", "1", "Once", "upon"],
            "generate: expected a text in quotes after --prompt, or a model after --model, got Once upon",
        ),
        (
            ["eval-ppl", "a/model", "book.txt"],
            "eval-ppl: expected only TEXT, or a model after --model, got also book.txt",
        ),
        (["convert", "a", "b", "c", "--to", "hf"], "convert: expected only SRC and DST, got also c"),
        (["doctor", "demo"], "doctor: expected only options, got demo"),
        (["doctor", ""], "doctor: expected only options, got an empty word"),
    ],
)
def test_a_word_that_stands_alone_is_told_where_it_belongs(capfd, arguments, expected):
    assert app.main(arguments) == 2
    assert capfd.readouterr().err.splitlines()[0] == f"error: {expected}"


def test_help_is_shown_whatever_stands_beside_it(capfd):
    assert app.main(["generate", "extra", "--help"]) == 0
    assert capfd.readouterr().out.startswith("Usage: mamba2 generate")


@pytest.mark.skipif(importlib.util.find_spec("typer._coercion") is None, reason="Typer shows values itself")
@pytest.mark.parametrize(
    ("command", "option", "value", "expected"),
    [
        ("convert", "--to", "gg'uf", "one of state-spaces, hf, fla"),
        ("generate", "--top-k", "1.5", "a whole number"),
        ("generate", "--seed", "9" * 5000, "a whole number of fewer digits"),
        ("generate", "--temperature", "warm", "a number"),
        ("generate", "--max-new-tokens", "-1", "a number from 0"),
        ("bench", "--repetitions", "0", "a number from 1"),
        ("quantize-state", "--seed", "2147483648", "a number up to 2147483647"),
    ],
)
def test_a_value_that_an_option_cannot_have_is_said_in_the_form_of_all_errors(
    capfd, command, option, value, expected
):
    assert app.main([command, option, value]) == 2
    assert capfd.readouterr().err.splitlines()[0] == f"error: {option}: expected {expected}, got {value}"


@pytest.mark.parametrize("value", ["gpu", "CPU", "cuda:", "cuda:-1", "cuda:200", "cpu:1", "cuda:0\n"])
def test_a_device_that_no_machine_has_is_wrong_usage_and_one_that_is_not_here_is_a_failure(capfd, value):
    for command in (["generate", "-p", "x"], ["bench", "demo"], ["eval-ppl", "text"]):
        assert app.main([*command, "--device", value]) == 2
        shown = value.replace("\n", "\\n")
        expected = f"error: --device: expected auto, cpu, cuda or cuda:N, got {shown}"
        assert capfd.readouterr().err.splitlines()[0] == expected
    assert app.main(["bench", "demo", "--device", "cuda:99"]) == 1


def whole_numbers() -> list[tuple[str, str]]:
    """Return the options that take one, each with its command, but the seeds, which count nothing."""
    return [
        (command.name, "--" + name.replace("_", "-"))
        for command in app.COMMANDS
        for name, kind in typing.get_type_hints(command.load()).items()
        if kind in (int, int | None) and name != "seed"
    ]


@pytest.mark.parametrize("value", ["1000000000", "9" * 23])
def test_numbers_that_nobody_means_are_refused_before_anything_is_done(capfd, value):
    arguments = {
        "eval-ppl": ["no-such-text"],
        "quantize-state": ["no-such-model"],
        "bench": ["no-such-model"],
    }
    found = whole_numbers()
    assert {command for command, _ in found} == {"generate", *arguments}
    for command, option in found:
        assert app.main([command, *arguments.get(command, []), option, value]) == 2
        error = capfd.readouterr().err.splitlines()[0]
        assert error == f"error: {option}: expected a number up to 999999999, got {value}"


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["quantize-state", "demo", "--calibrate", ""], "--calibrate"),
        (["quantize-state", "demo", "--output="], "--output"),
        (["quantize-state", "demo", "-o", ""], "--output"),
        (["generate", "-p", "", "-m", ""], "--model"),
        (["inspect", "--json", ""], "MODEL"),
        (["convert", "demo", "", "--to", "hf"], "DST"),
    ],
)
def test_an_empty_name_is_not_taken_for_the_current_folder(capfd, arguments, what):
    assert app.main(arguments) == 2
    assert capfd.readouterr().err.splitlines()[0] == f"error: {what}: expected a value, got an empty one"
