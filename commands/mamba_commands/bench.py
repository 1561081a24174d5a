"""`mamba2 bench`: how fast a model runs on this machine, and how near the machine's own limits."""

import csv
import io
import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mamba_commands.options import (
    LARGEST_COUNT,
    BackendOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    QuietOption,
    RevisionOption,
    StateDtypeOption,
    check_state_dtype,
    parse_count,
)
from mamba_commands.output import Output

if TYPE_CHECKING:
    from mamba_cli.ceilings import Ceilings
    from mamba_cli.language_model import LanguageModel

Row = dict[str, Any]


class Significant(float):
    """A number that prints with four significant digits and no exponent, for people."""

    def __str__(self) -> str:
        digits = 3 - math.floor(math.log10(abs(self))) if self else 0
        return f"{round(float(self), digits):.{max(digits, 0)}f}"


def bench(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A folder, a repo id of the Hugging Face hub, or demo.",
            show_default=False,
        ),
    ] = None,
    shape: Annotated[
        Literal[
            "130m",
            "370m",
            "780m",
            "1.3b",
            "2.7b",
            "mamba1-130m",
            "mamba1-370m",
            "mamba1-790m",
            "mamba1-1.4b",
            "mamba1-2.8b",
        ]
        | None,
        typer.Option(
            metavar="SHAPE",
            help="Instead of MODEL, a published shape with random weights, in bfloat16 unless --dtype is "
            "given: 130m, 370m, 780m, 1.3b or 2.7b; of Mamba-1, mamba1-130m, -370m, -790m, -1.4b or -2.8b.",
        ),
    ] = None,
    prompt_lengths: Annotated[
        str, typer.Option(metavar="N,N...", help="Tokens of the prompt; several with commas between.")
    ] = "512",
    generate: Annotated[
        str, typer.Option(metavar="N,N...", help="Tokens generated after each prompt; 0 measures no decode.")
    ] = "128",
    batch_sizes: Annotated[str, typer.Option(metavar="N,N...", help="Sequences side by side.")] = "1",
    repetitions: Annotated[
        int, typer.Option(metavar="N", min=1, help="Runs of each kind, after one that is discarded.")
    ] = 5,
    json: JsonOption = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Write comma-separated lines to stdout.")] = False,
    revision: RevisionOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    backend: BackendOption = "auto",
    state_dtype: StateDtypeOption = None,
    quiet: QuietOption = False,
) -> None:
    """Measure prefill and decode: tokens a second, share of what the machine can do, peak memory.

    A row is a prompt read from nothing (prefill), or tokens generated after it by the loop that
    generate runs, greedy (decode); ms are those of a prompt or of a step. tok/s are of all sequences
    together: the mean over the repetitions, and the standard deviation.

    GB/s and TFLOP/s count the least a model has to do, not what this implementation does: weights and
    state through the memory, two operations for each weight a token passes, the recurrence. Their shares
    are of a large copy and a large matmul measured on the same device, in the same dtype, before.
    """
    if (model is None) == (shape is None):
        given = "both" if model else "neither"
        raise typer.BadParameter(f"MODEL: expected a model (demo is one) or --shape, got {given}")
    if shape and revision:
        raise typer.BadParameter("--revision: expected a MODEL, whose repo it is of, got --shape")
    if json and as_csv:
        raise typer.BadParameter("--csv: expected no --json beside it, got both")
    lists = (
        _parse_list("--batch-sizes", batch_sizes),
        _parse_list("--prompt-lengths", prompt_lengths),
        _parse_list("--generate", generate, least=0),
    )
    check_state_dtype(state_dtype)
    out = Output(quiet)

    from mamba_cli import load_model
    from mamba_cli.bench import count_runs, measure, published_model
    from mamba_cli.ceilings import measure_ceilings
    from mamba_cli.machine import check_room

    if shape:
        with out.progress(None, f"making {shape} of random weights"):  # 12 s for 780m on a CPU
            lm = published_model(shape, device, dtype, backend, state_dtype)
    else:
        lm = load_model(
            str(model), device, dtype, revision=revision, backend=backend, state_dtype=state_dtype
        )
    check_room("--batch-sizes", max(lists[0]), lm.init_state(1).nbytes, lm.device)
    rows: list[Row] = []
    try:
        with out.progress(count_runs(*lists, repetitions), "measuring the machine") as advance:
            ceilings = measure_ceilings(lm.device, lm.dtype)
            for measurement in measure(lm, *lists, repetitions, advance):
                rows.append(measurement.figures(ceilings))
    finally:
        if rows:  # what is measured is not lost where a larger batch does not fit, or at Ctrl-C
            run = _describe(lm, repetitions)
            if json:
                out.json({**run, "ceilings": _document(ceilings), "measurements": rows})
            elif as_csv:
                out.data(_csv([{**_flat(run), **row} for row in rows]), end="")
            else:
                _print_table(rows, out)
                _print_notes(run, ceilings, out)


def _parse_list(option: str, text: str, least: int = 1) -> list[int]:
    """Return the numbers of `text`, each once, in their order."""
    counts = [parse_count(part, least) for part in text.split(",")]
    if None in counts:
        raise typer.BadParameter(
            f"{option}: expected numbers from {least} to {LARGEST_COUNT} with commas between, got {text}"
        )
    return list(dict.fromkeys(counts))


def _describe(lm: "LanguageModel", repetitions: int) -> Row:
    """Return what holds for all rows."""
    import torch

    from mamba_cli.machine import PEAK_MEMORY, device_name, versions

    found = versions()
    return {
        "model": lm.name,
        "backend": lm.backend,
        "device": str(lm.device),
        "device_name": device_name(lm.device),
        "threads": torch.get_num_threads() if lm.device.type == "cpu" else None,
        "dtype": str(lm.dtype).removeprefix("torch."),
        "state_dtype": lm.state_dtype,
        "repetitions": repetitions,
        "peak_memory_kind": PEAK_MEMORY[lm.device.type],
        "versions": {package: found[package] for package in ("python", "mamba2", "torch", "triton")},
    }


def _document(ceilings: "Ceilings") -> Row:
    return {
        "gb_per_second": ceilings.bytes_per_second / 1e9,
        "tflop_per_second": ceilings.operations_per_second / 1e12,
        "method": ceilings.method,
    }


def _flat(run: Row) -> Row:
    """The same without a table inside: versions become columns of their own."""
    return {name: value for name, value in run.items() if name != "versions"} | run["versions"]


def _csv(rows: list[Row]) -> str:
    written = io.StringIO()
    writer = csv.DictWriter(written, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return written.getvalue()


def _print_table(rows: list[Row], out: Output) -> None:
    columns = (
        "phase", "batch", "prompt", "generate", "tok/s", "+-", "ms", "GB/s", "% of copy", "TFLOP/s",
        "% of matmul", "peak MiB",
    )  # fmt: skip
    lines = [
        (
            row["phase"],
            row["batch_size"],
            row["prompt_length"],
            row["generate"],
            Significant(row["tokens_per_second"]),
            _number(row["tokens_per_second_deviation"]),
            Significant(row["milliseconds"]),
            Significant(row["gb_per_second"]),
            Significant(100 * row["bandwidth_share"]),
            Significant(row["tflop_per_second"]),
            Significant(100 * row["matmul_share"]),
            _number(row["peak_memory_bytes"], 2**20),
        )
        for row in rows
    ]
    out.table(columns, lines)


def _number(value: float | None, unit: int = 1) -> "Significant | str":
    return "-" if value is None else Significant(value / unit)


def _print_notes(run: Row, ceilings: "Ceilings", out: Output) -> None:
    limits = _document(ceilings)
    repetitions = "1 repetition" if run["repetitions"] == 1 else f"{run['repetitions']} repetitions"
    threads = "" if run["threads"] is None else f", threads: {run['threads']}"
    out.note(
        f"{run['model']}: {run['backend']} on {run['device']} ({run['device_name']}{threads}) in "
        f"{run['dtype']}, state in {run['state_dtype']}, {repetitions} after a discarded run"
    )
    out.note(
        f"ceilings, {limits['method']}: {Significant(limits['gb_per_second'])} GB/s, "
        f"{Significant(limits['tflop_per_second'])} TFLOP/s; memory: {run['peak_memory_kind']}"
    )
