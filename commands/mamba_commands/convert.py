"""`mamba2 convert`: a checkpoint in another format, dtype or number of files."""

from dataclasses import asdict
from typing import Annotated, Literal

import typer

from mamba_commands.options import JsonOption, QuietOption, RevisionOption
from mamba_commands.output import Output


def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Folder, repo id, or demo.")],
    destination: Annotated[str, typer.Argument(metavar="DST", help="Folder to write.")],
    to: Annotated[
        Literal["state-spaces", "hf", "fla"],
        typer.Option("--to", metavar="FORMAT", help="Format to write: state-spaces, hf or fla."),
    ],
    dtype: Annotated[
        Literal["keep", "float32", "bfloat16", "float16"],
        typer.Option(
            metavar="DTYPE",
            show_default=False,
            help="Of the weights: float32, bfloat16, float16, or keep (default). A_log, D and dt_bias are "
            "never narrowed.",
        ),
    ] = "keep",
    safetensors: Annotated[
        bool | None,
        typer.Option(
            "--safetensors/--bin",
            help="Kind of weights for state-spaces. mamba_ssm reads only .bin, the default.",
            show_default=False,
        ),
    ] = None,
    max_shard_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Largest .safetensors file, as 5GB or 500MB. [default: 5GB]"),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="PATH_OR_REPO",
            help="Tokenizer to put beside the weights, where it is not the one in SRC; for published "
            "state-spaces models without one it is EleutherAI/gpt-neox-20b.",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace DST, once the new one is complete.")
    ] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Compare the logits of both, too.")] = False,
    revision: RevisionOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Write a checkpoint in another format. Prints the folder that was written.

    Tensors go one at a time, so memory does not grow with the model; they are read back and compared to
    the last bit. DST appears when all of it is there and right. What the format cannot hold is an error
    before anything is written. Within one format, with nothing else asked for, it is a copy.
    """
    from mamba_cli.convert import convert as convert_checkpoint
    from mamba_cli.errors import Mamba2Error
    from mamba_cli.writing import parse_size

    if safetensors is False and to != "state-spaces":
        raise typer.BadParameter(f"--bin: expected --to state-spaces beside it, got --to {to}")
    if max_shard_size is not None:
        if safetensors is False:
            raise typer.BadParameter("--max-shard-size: expected no --bin beside it, as that is one file")
        try:
            parse_size(max_shard_size)
        except Mamba2Error as error:
            raise typer.BadParameter(error.message.replace("size", "--max-shard-size", 1)) from error
    out = Output(quiet)
    with out.progress(1, "converting") as advance:
        result = convert_checkpoint(
            source,
            destination,
            to,
            dtype=None if dtype == "keep" else dtype,
            weights={True: "safetensors", False: "bin", None: None}[safetensors],
            max_shard_size=max_shard_size,
            tokenizer=tokenizer,
            overwrite=overwrite,
            verify=verify,
            revision=revision,
            on_progress=advance,
        )
    for note in result.notes:
        out.warning(note)
    if json:
        out.json(asdict(result) | {"destination": str(result.destination)})
        return
    done = "copied" if result.copied else f"{result.source_format} to {result.format}"
    out.note(f"{done}: {result.tensors} tensors, {result.nbytes:,} bytes, read back and equal")
    if result.logits_difference is not None:
        out.note(f"logits: relative difference {result.logits_difference:.1e}")
    out.data(str(result.destination))
