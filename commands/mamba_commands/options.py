"""Options that several commands share: each has one spelling, one help text and one home."""

import re
from typing import Annotated, Literal

import typer

from mamba_cli.errors import Mamba2Error
from mamba_commands.output import Output

# The model inside the package, and the one to name to somebody who wants a real one.
DEMO_MODEL = "demo"
SUGGESTED_MODEL = "state-spaces/mamba2-130m"

# More of anything nobody means, and torch would fail on it in its own words.
LARGEST_COUNT = 999_999_999

ModelArgument = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A folder, a repo id of the Hugging Face hub, or demo."),
]

ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        envvar="MAMBA2_MODEL",
        help="A folder, or a repo id of the Hugging Face hub. Without one, or with 'demo', the small model "
        "inside this package.",
    ),
]

TokenizerOption = Annotated[
    str | None,
    typer.Option(metavar="PATH_OR_REPO", help="Use this tokenizer instead of the model's own."),
]

RevisionOption = Annotated[
    str | None, typer.Option(metavar="REV", help="Branch, tag or commit of the model's repo.")
]


def _check_device(device: str) -> str:
    """Refuse, as wrong usage, what no --device can be; whether torch finds it is seen when a model is loaded.

    No machine has 100 GPUs, and torch reads an index from 128 on as a negative one.
    """
    if not re.fullmatch(r"auto|cpu|cuda(:(0|[1-9][0-9]?))?", device):
        raise typer.BadParameter(f"--device: expected auto, cpu, cuda or cuda:N, got {device}")
    return device


DeviceOption = Annotated[
    str,
    typer.Option(
        metavar="DEVICE",
        show_default=False,
        callback=_check_device,
        help="cpu, cuda, cuda:1, or auto (default): a GPU if there is one.",
    ),
]

DtypeOption = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option(
        metavar="DTYPE", show_default=False, help="float32, bfloat16, float16, or auto (default): as stored."
    ),
]

BackendOption = Annotated[
    Literal["auto", "torch", "triton"],
    typer.Option(
        metavar="BACKEND", show_default=False, help="torch, triton, or auto (default): Triton on a GPU."
    ),
]

StateDtypeOption = Annotated[
    str | None,
    typer.Option(
        metavar="FORMAT",
        help="How SSM states are kept: fp32, bf16, fp16, int8, fp8 or int4, by the recommended recipe. After "
        "a colon each: stochastic or nearest, tokens between two writes, outer (column scales, in a model "
        "that quantize-state wrote), uniform (all heads alike), as int8:nearest:1. Default: what the model "
        "says, or fp32.",
    ),
]

SeedOption = Annotated[
    int | None,
    typer.Option(metavar="N", help="Repeat a result: the same seed, the same text. Random without one."),
]

JsonOption = Annotated[bool, typer.Option("--json", help="Write one JSON document to stdout.")]

QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Only warnings and errors on stderr.")]

VerboseOption = Annotated[bool, typer.Option("--verbose", "-v", help="Details on stderr.")]


def parse_count(text: str, least: int = 1) -> int | None:
    """Return the number from `least` to LARGEST_COUNT that `text` is; None where it is none."""
    text = text.strip()
    fits = text.isdecimal() and len(text) <= len(str(LARGEST_COUNT)) and int(text) >= least
    return int(text) if fits else None


def check_state_dtype(text: str | None, option: str = "--state-dtype") -> None:
    """Refuse, as wrong usage of `option`, what no --state-dtype can be."""
    if text is None:
        return
    from mamba_cli.state_format import parse_state_spec

    try:
        parse_state_spec(text)
    except Mamba2Error as error:
        raise typer.BadParameter(f"{option}: {error.message.removeprefix('state-dtype: ')}") from None


def choose_model(model: str | None, out: Output) -> str:
    """Return the model to load: the demo, with a note that says so, where none is named."""
    if model:
        return model
    out.note(f"note: using the small demo model; for a real one: --model {SUGGESTED_MODEL}")
    return DEMO_MODEL
