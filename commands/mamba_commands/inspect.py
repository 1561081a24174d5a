"""`mamba2 inspect`: what a checkpoint holds, as a table, as JSON, or as a check of every value."""

import math
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, astuple
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mamba_cli.errors import Mamba2Error
from mamba_commands.log_axis import BAR, LogAxis, short, terminal_draws
from mamba_commands.options import JsonOption, ModelArgument, QuietOption, RevisionOption
from mamba_commands.output import Output, is_terminal

if TYPE_CHECKING:
    from mamba_cli.checkpoint import Checkpoint
    from mamba_cli.inspection import Inspection
    from mamba_cli.soundness import Soundness

# What is said of a check that found nothing.
SOUND = {
    "nan": "no NaN",
    "inf": "no infinity",
    "zero": "no tensor of zeros",
    "constant": "no tensor of one value",
    "config": "the tensors, the configuration and the tokenizer agree",
}

PIPED_WIDTH = 40  # of a bar where no terminal sets one


class Grouped(int):
    """An integer that prints with its digits in groups of three, for people."""

    def __str__(self) -> str:
        return f"{int(self):,}"


def inspect(
    model: ModelArgument,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor instead.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Read and check every value instead.")] = False,
    revision: RevisionOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Show what a checkpoint holds: format, dimensions, parameters, state, and memory by layer.

    Memory is given as half-life: the tokens after which a head has forgotten one half. A state decays
    by exp(dt*A) a token, with A = -exp(A_log) and dt = softplus(dt_bias) within dt_limit. That is
    dt where the input contributes nothing (the bias alone); text moves it both ways.

    State bytes are for one sequence. Those of a quantized state include its scales and its window of
    recent tokens, and heads that remember long are in a wider dtype, as --state-dtype keeps them; the
    convolution's state and attention's keys and values are in fp32 or 16 bits. A last row has the format
    that quantize-state saved with the model.

    --check exits with 1 where a tensor holds NaN or infinities, or a weight is all zeros or constant.
    """
    from mamba_cli.checkpoint import open_checkpoint
    from mamba_cli.inspection import inspect_checkpoint

    out = Output(quiet)
    checkpoint = open_checkpoint(model, revision)
    soundness = _check(checkpoint, out) if check else None
    if json:
        document = _document(inspect_checkpoint(checkpoint, model))
        if tensors:
            document["tensors"] = _tensors(checkpoint)
        if soundness:
            document["check"] = {"sound": not soundness.broken, **asdict(soundness)}
        out.json(document)
    else:
        if tensors:
            _print_tensors(checkpoint, out)
        if soundness:
            _print_check(soundness, out)
        if not tensors and not check:
            _print_facts(inspect_checkpoint(checkpoint, model), out)
    if soundness and soundness.broken:
        raise Mamba2Error(f"{model}: expected a sound checkpoint, got {soundness.broken} broken parts")


def _check(checkpoint: "Checkpoint", out: Output) -> "Soundness":
    from mamba_cli.soundness import check_checkpoint

    with out.progress(checkpoint.nbytes, "checking") as advance:
        return check_checkpoint(checkpoint, advance)


def _tensors(checkpoint: "Checkpoint") -> list[dict[str, Any]]:
    from mamba_cli.storage import dtype_name

    return [
        {
            "name": name,
            "stored_as": tensor.name,
            "dtype": dtype_name(tensor.dtype),
            "shape": list(tensor.shape),
            "nbytes": tensor.nbytes,
        }
        for name, tensor in checkpoint.tensors.items()
    ]


def _document(inspection: "Inspection") -> dict[str, Any]:
    """The facts as strict JSON: what is infinite (a half-life, the end of dt_limit) is null."""
    from mamba_cli.inspection import dimensions

    return _strict(asdict(inspection) | {"config": dimensions(inspection.config)})


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _print_tensors(checkpoint: "Checkpoint", out: Output) -> None:
    number = _number()
    rows = [
        (entry["name"], entry["dtype"], "x".join(map(str, entry["shape"])), number(entry["nbytes"]))
        for entry in _tensors(checkpoint)
    ]
    out.table(("tensor", "dtype", "shape", "bytes"), rows)


def _print_check(soundness: "Soundness", out: Output) -> None:
    rows = []
    for check, verdict in SOUND.items():
        found = [finding for finding in soundness.findings if finding.check == check]
        rows += [
            ("broken" if finding.broken else "suspicious", check, finding.subject, finding.detail)
            for finding in found
        ] or [("ok", check, f"{soundness.tensors} tensors", verdict)]
    out.table(("result", "check", "subject", "detail"), rows)


def _print_facts(inspection: "Inspection", out: Output) -> None:
    number = _number()
    out.table(("fact", "value"), [(name, _words(value)) for name, value in _facts(inspection)])
    _next_table("Bytes of one sequence's state, by the SSM state's dtype", out)
    state = [
        (
            f"{row.dtype} (saved)" if row.saved else row.dtype,
            number(row.ssm),
            number(row.conv),
            number(row.kv_per_token),
        )
        for row in inspection.state
    ]
    out.table(("dtype", "ssm_state", "conv_state", "kv/token"), state)
    _next_table("Half-life of the heads' memory, in tokens", out)
    _print_layers(inspection, out)


def _next_table(title: str, out: Output) -> None:
    """Part tables by an empty line; in a pipe by that alone, so that only tables come out."""
    out.data(f"\n{title}" if is_terminal(sys.stdout) else "")


def _facts(inspection: "Inspection") -> Iterator[tuple[str, Any]]:
    """What the first table says, line by line."""
    from mamba_cli.inspection import dimensions

    number = _number()
    for name in ("model", "folder", "format", "reason", "family"):
        yield name, getattr(inspection, name)
    for part, count in asdict(inspection.parameters).items():
        yield f"parameters.{part}", number(count)
    yield "bytes.total", number(sum(stored.nbytes for stored in inspection.stored))
    for stored in inspection.stored:
        yield f"bytes.{stored.dtype}", number(stored.nbytes)
    yield "padding", inspection.padding
    if inspection.state_quantization:
        yield "state_quantization", inspection.state_quantization
    tokenizer = asdict(inspection.tokenizer)
    yield "tokenizer", tokenizer.pop("kind")
    yield from ((f"tokenizer.{name}", value) for name, value in tokenizer.items() if value is not None)
    for name, value in dimensions(inspection.config).items():
        if isinstance(value, dict):
            yield from ((f"{name}.{inner}", inner_value) for inner, inner_value in value.items())
        else:
            yield name, value
    yield from (("note", note) for note in inspection.notes)


def _words(value: Any) -> str:
    """A fact's value in words."""
    if value is None or value == []:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        return ", ".join(_words(item) for item in value)
    return str(value)


def _print_layers(inspection: "Inspection", out: Output) -> None:
    """One line a layer; the bars share one logarithmic axis, whose labels head their column."""
    terminal = is_terminal(sys.stdout)
    write = short if terminal else "{:.6g}".format
    rows = []
    for layer in inspection.layers:
        lives = map(write, astuple(layer.half_life)) if layer.half_life else ("-", "-", "-")
        rows.append((layer.index, layer.kind, *lives))
    columns = ("layer", "kind", "min", "median", "max")
    width = PIPED_WIDTH
    if terminal:
        taken = sum(max(len(str(row[i])) for row in (columns, *rows)) + 2 for i in range(len(columns)))
        width = min(max(shutil.get_terminal_size().columns - taken, 16), 60)
    axis = LogAxis(_every_half_life(inspection), width, plain=not terminal_draws(BAR))
    drawn = [
        axis.bar(*astuple(layer.half_life)) if layer.half_life else _attention(inspection)
        for layer in inspection.layers
    ]
    heading = axis.labels() if terminal else "range"
    out.table((*columns, heading), [(*row, bar) for row, bar in zip(rows, drawn, strict=True)])


def _every_half_life(inspection: "Inspection") -> list[float]:
    return [value for layer in inspection.layers if layer.half_life for value in astuple(layer.half_life)]


def _attention(inspection: "Inspection") -> str:
    attention = inspection.config.attention
    return f"{attention.num_heads} x {attention.head_dim}, kv {attention.num_heads_kv}"


def _number() -> type[int]:
    """How counts and bytes are written: in groups of three for people, plain in a pipe."""
    return Grouped if is_terminal(sys.stdout) else int
