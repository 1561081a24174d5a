"""`mamba2 bench`, run through main as the shell runs it."""

import contextlib
import csv
import inspect
import io
import json
import typing
from collections.abc import Callable, Iterator

import pytest
import torch

import mamba_cli.bench
from mamba_cli import ceilings, shapes
from mamba_cli.language_model import LanguageModel
from mamba_commands.app import main
from mamba_commands.bench import Significant, bench
from mamba_commands.output import Output
from model_testing import DATA

MODEL = str(DATA / "golden" / "default")
SMALL = ("--prompt-lengths", "3,5", "--generate", "2", "--repetitions", "2")


@pytest.fixture(autouse=True)
def small_ceilings(monkeypatch):
    monkeypatch.setitem(ceilings.COPY_BYTES, "cpu", 2**16)
    monkeypatch.setitem(ceilings.MATMUL_SIZE, "cpu", 32)


def run(capfd, *arguments: str) -> tuple[int, str, str]:
    capfd.readouterr()
    status = main(["bench", *arguments, "--device", "cpu"])
    return status, *capfd.readouterr()


def strict(text: str) -> dict:
    def refuse(constant: str):
        raise AssertionError(f"not JSON: {constant}")

    return json.loads(text, parse_constant=refuse)


def test_the_table_has_a_line_for_each_kind_of_run(capfd):
    status, out, err = run(capfd, MODEL, *SMALL, "--batch-sizes", "1,2")
    assert status == 0
    columns, *lines = [line.split("\t") for line in out.splitlines()]
    assert columns == [
        "phase", "batch", "prompt", "generate", "tok/s", "+-", "ms", "GB/s", "% of copy", "TFLOP/s",
        "% of matmul", "peak MiB",
    ]  # fmt: skip
    assert [line[:4] for line in lines] == [
        ["prefill", "1", "3", "0"],
        ["decode", "1", "3", "2"],
        ["prefill", "1", "5", "0"],
        ["decode", "1", "5", "2"],
        ["prefill", "2", "3", "0"],
        ["decode", "2", "3", "2"],
        ["prefill", "2", "5", "0"],
        ["decode", "2", "5", "2"],
    ]
    assert all(float(cell) >= 0 for line in lines for cell in line[4:])
    assert "torch on cpu" in err and "2 repetitions after a discarded run" in err
    assert "ceilings, measured: a copy of" in err and "memory: peak resident memory of the process" in err


def test_json_says_what_ran_and_what_it_is_compared_with(capfd):
    status, out, _ = run(capfd, MODEL, *SMALL, "--json", "--dtype", "float32")
    document = strict(out)
    assert status == 0
    assert (document["model"], document["backend"], document["device"]) == (MODEL, "torch", "cpu")
    assert (document["dtype"], document["state_dtype"]) == ("float32", "fp32")
    assert document["threads"] == torch.get_num_threads()
    assert document["versions"]["torch"] == torch.__version__
    limits = document["ceilings"]
    assert limits["method"].startswith("measured: ")
    assert len(document["measurements"]) == 4
    for row in document["measurements"]:
        assert row["bandwidth_share"] == pytest.approx(row["gb_per_second"] / limits["gb_per_second"])
        assert row["matmul_share"] == pytest.approx(row["tflop_per_second"] / limits["tflop_per_second"])
        assert row["peak_memory_bytes"] > 0


def test_each_line_of_csv_stands_alone(capfd):
    status, out, _ = run(capfd, MODEL, *SMALL, "--csv", "--quiet")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert status == 0 and len(rows) == 4
    assert {(row["model"], row["device"], row["backend"], row["torch"]) for row in rows} == {
        (MODEL, "cpu", "torch", torch.__version__)
    }
    assert [row["phase"] for row in rows] == ["prefill", "decode"] * 2
    assert all(float(row["tokens_per_second"]) > 0 for row in rows)


def test_quiet_leaves_the_table_alone(capfd):
    _, out, err = run(capfd, MODEL, *SMALL, "--quiet")
    assert out.startswith("phase\t") and err == ""


def test_no_generation_measures_no_decode_and_one_repetition_has_no_deviation(capfd):
    options = ("--prompt-lengths", "4,4", "--generate", "0", "--repetitions", "1")
    _, out, _ = run(capfd, MODEL, *options, "--json")
    (row,) = strict(out)["measurements"]
    assert (row["phase"], row["tokens_per_second_deviation"]) == ("prefill", None)
    _, out, _ = run(capfd, MODEL, *options)
    assert out.splitlines()[1].split("\t")[5] == "-"


def test_a_published_shape_needs_no_checkpoint(capfd, monkeypatch):
    monkeypatch.setitem(shapes.PUBLISHED, "370m", (64, 1))
    _, out, _ = run(capfd, "--shape", "370m", *SMALL, "--json")
    document = strict(out)
    assert (document["model"], document["dtype"]) == ("370m with random weights", "bfloat16")


def test_progress_is_shown_while_random_weights_are_made_and_while_they_are_measured(capfd, monkeypatch):
    monkeypatch.setitem(shapes.PUBLISHED, "370m", (64, 1))
    seen, make = [], mamba_cli.bench.published_model

    @contextlib.contextmanager
    def progress(self: Output, total: float | None, label: str) -> Iterator[Callable[..., None]]:
        seen.append(label)
        yield lambda amount, label=None: None
        seen.append("done")

    monkeypatch.setattr(Output, "progress", progress)
    monkeypatch.setattr(
        mamba_cli.bench, "published_model", lambda *arguments: seen.append("made") or make(*arguments)
    )
    assert run(capfd, "--shape", "370m", *SMALL)[0] == 0
    assert seen == ["making 370m of random weights", "made", "done", "measuring the machine", "done"]


def test_every_published_shape_can_be_named():
    choices, _ = typing.get_args(typing.get_args(inspect.signature(bench).parameters["shape"].annotation)[0])
    assert typing.get_args(choices) == tuple(shapes.PUBLISHED)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "MODEL: expected a model (demo is one) or --shape, got neither"),
        ((MODEL, "--shape", "130m"), "MODEL: expected a model (demo is one) or --shape, got both"),
        ((MODEL, "--json", "--csv"), "--csv: expected no --json beside it, got both"),
        (
            (MODEL, "--batch-sizes", "1,0"),
            "--batch-sizes: expected numbers from 1 to 999999999 with commas between, got 1,0",
        ),
        (
            (MODEL, "--prompt-lengths", "5,"),
            "--prompt-lengths: expected numbers from 1 to 999999999 with commas between, got 5,",
        ),
        (
            (MODEL, "--batch-sizes", "9" * 5000),
            f"--batch-sizes: expected numbers from 1 to 999999999 with commas between, got {'9' * 5000}",
        ),
        (
            ("--shape", "130m", "--revision", "v1"),
            "--revision: expected a MODEL, whose repo it is of, got --shape",
        ),
        (
            (MODEL, "--generate", "8,x"),
            "--generate: expected numbers from 0 to 999999999 with commas between, got 8,x",
        ),
    ],
)
def test_wrong_usage_is_refused_before_a_model_is_loaded(capfd, arguments, message):
    status, out, err = run(capfd, *arguments)
    assert (status, out, err) == (2, "", f"error: {message}\nhint: see mamba2 bench --help\n")


def test_a_batch_that_the_memory_cannot_hold_is_refused_before_anything_is_measured(capfd, monkeypatch):
    monkeypatch.setattr("mamba_cli.ceilings.measure_ceilings", lambda *arguments: pytest.fail("was measured"))
    status, out, err = run(capfd, MODEL, *SMALL, "--batch-sizes", "1,999999999")
    assert (status, out) == (1, "")
    assert err.startswith("error: --batch-sizes: expected at most ") and "got 999999999\n" in err


@pytest.mark.parametrize("format", ["--json", "--csv", None])
def test_what_was_measured_is_written_where_a_later_run_fails(capfd, monkeypatch, format):
    original = LanguageModel.prefill

    def prefill(self, ids, state=None):
        if ids.shape[0] > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(self, ids, state)

    monkeypatch.setattr(LanguageModel, "prefill", prefill)
    status, out, err = run(capfd, MODEL, *SMALL, "--batch-sizes", "1,2", *filter(None, [format]))
    assert status == 1
    assert "error: batch 2, prompt 3: expected it to fit the memory of cpu, got out of memory\n" in err
    if format == "--json":
        assert len(strict(out)["measurements"]) == 4
    else:
        assert len(out.splitlines()) == 1 + 4


def test_a_run_that_measured_nothing_writes_nothing(capfd, tmp_path):
    status, out, err = run(capfd, str(tmp_path / "none"), *SMALL, "--json")
    assert (status, out) == (1, "") and err.startswith("error: ")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.0421549, "0.04215"), (87.654, "87.65"), (915123.4, "915100")],
)
def test_numbers_for_people_have_four_digits_and_no_exponent(value, text):
    assert str(Significant(value)) == text
