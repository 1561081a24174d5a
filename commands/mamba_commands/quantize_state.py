"""`mamba2 quantize-state`: a narrower recurrent state, chosen on a text, its cost and its loss measured."""

import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mamba_cli.errors import Mamba2Error
from mamba_commands.options import (
    BackendOption,
    DeviceOption,
    JsonOption,
    ModelArgument,
    QuietOption,
    RevisionOption,
    TokenizerOption,
    check_state_dtype,
)
from mamba_commands.output import Output

if TYPE_CHECKING:
    from mamba_cli.language_model import LanguageModel
    from mamba_cli.perplexity.plan import Plan
    from mamba_cli.perplexity.texts import Text

BUILT_IN = "built-in text"
DEFAULT_COMPARE = "fp32,bf16,int8,fp8,int4"
# Tokens of the text that are read, unless told otherwise: a minute's worth for a small model.
MAX_TOKENS = {"cpu": 4096, "cuda": 32768}
# Fewer say little of a head that remembers hundreds of tokens.
FEW_TOKENS = 1000


def quantize_state(
    model: ModelArgument,
    state_dtype: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help="int8 (default), fp8, int4, fp16 or bf16: the recommended recipe. After a colon each: "
            "stochastic or nearest, tokens between two writes, outer (column scales), uniform (all heads "
            "alike), as int8:nearest:1.",
            show_default=False,
        ),
    ] = None,
    recipe: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Take the format from a JSON file, as a written config.json has it."
        ),
    ] = None,
    calibrate: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="A .txt, .jsonl or .parquet file, - for stdin, or a data set as eval-ppl takes it. Without "
            "one, a short text inside this package.",
        ),
    ] = None,
    target_ppl_increase: Annotated[
        str | None,
        typer.Option(
            metavar="PERCENT",
            help="Widen the most sensitive layers until perplexity grows by at most this, as 0.5%.",
        ),
    ] = None,
    compare: Annotated[
        str, typer.Option(metavar="FORMAT,...", help="Formats to measure beside the chosen one.")
    ] = DEFAULT_COMPARE,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=2,
            help="Read only the text's first N tokens. [default: 4096, on a GPU 32768]",
            show_default=False,
        ),
    ] = None,
    window: Annotated[
        int, typer.Option(metavar="N", min=1, help="Tokens read one by one from an empty state.")
    ] = 1024,
    sensitivity_tokens: Annotated[
        int, typer.Option(metavar="N", min=0, help="Tokens on which each layer is tried alone; 0 for none.")
    ] = 512,
    batch_size: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Sequences side by side when a step is timed. [default: 1, on a GPU 64]",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(metavar="N", min=0, max=2**31 - 1, help="Of the stochastic rounding.")
    ] = 0,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="OUT", help="Folder to write. Without it, only the report."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace OUT, once the new one is complete.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw error against position into a .png or .svg file (needs matplotlib).",
        ),
    ] = None,
    field: Annotated[
        str, typer.Option(metavar="NAME", help="Key or column that holds a row's text.")
    ] = "text",
    tokenizer: TokenizerOption = None,
    revision: RevisionOption = None,
    device: DeviceOption = "auto",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(
            metavar="DTYPE",
            show_default=False,
            help="Of weights and activations: float32, bfloat16, float16, or auto (default): speed as "
            "stored, losses in float32, where nothing but the state is rounded.",
        ),
    ] = "auto",
    backend: BackendOption = "auto",
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Choose how the recurrent state is kept in few bits, and measure what it costs and loses.

    The text is read token by token, as generate decodes, once with the state in fp32 and once in each
    format. The loss is the change of perplexity, with the standard error of the difference; KL
    divergence; how often the most probable token stays the same; the mean change of a token's NLL, and
    how that grows with the position: growth 0 is none, 0.5 noise that adds up, 1 drift.

    -o writes the same weights (linked or copied) with the choice in the configuration, which generate,
    eval-ppl and bench then follow, and other tools do not see. Tokenizer, templates, code, README and
    licence are taken along; optimizer states, other folders and hidden files are not.
    """
    if recipe and state_dtype:
        raise typer.BadParameter("--recipe: expected no --state-dtype beside it, got both")
    target = None if target_ppl_increase is None else _parse_percent(target_ppl_increase)
    if target is not None and not sensitivity_tokens:
        raise typer.BadParameter("--sensitivity-tokens: expected some with --target-ppl-increase, got 0")
    if overwrite and output is None:
        raise typer.BadParameter("--overwrite: expected --output OUT beside it, got none")
    specs = [*dict.fromkeys(filter(None, map(str.strip, compare.split(","))))]
    out = Output(quiet)

    from mamba_cli import load_model
    from mamba_cli.checkpoint import open_checkpoint
    from mamba_cli.hub import resolve
    from mamba_cli.machine import check_room
    from mamba_cli.perplexity.plot import check_plot
    from mamba_cli.publish import check_destination
    from mamba_cli.quantize.plot import plot_errors
    from mamba_cli.quantize.report import FormatReport
    from mamba_cli.quantize.saved import check_can_carry, read_recipe, write_quantized
    from mamba_cli.quantize.study import Request, choose, compare_losses, formats_beside, measure_costs
    from mamba_commands.state_report import Report, document, print_report

    check_state_dtype(state_dtype)
    for spec in specs:
        check_state_dtype(spec, "--compare")
    if state_dtype == "fp32":
        raise typer.BadParameter("--state-dtype: expected a format narrower than fp32, got fp32")
    if plot:
        check_plot(plot)
    if output:
        output = output.expanduser()
        folder = resolve(model, revision)
        check_can_carry(model, folder)
        check_destination(output, folder, overwrite)
    checkpoint = open_checkpoint(model, revision)
    given = read_recipe(recipe, checkpoint.config) if recipe else None
    load = partial(
        load_model, model, device, revision=revision, backend=backend, tokenizer=tokenizer, state_dtype="fp32"
    )
    text = _read_text(calibrate, field)
    lm = load("float32" if dtype == "auto" else dtype)
    if batch_size:  # which is run last
        check_room("--batch-size", batch_size, lm.init_state(1).nbytes, lm.device)
    plan = _plan(lm, text, max_tokens, window)
    tokens = "1 token" if plan.predictions == 1 else f"{plan.predictions} tokens"
    out.note(f"{text.title}: {tokens}, each read once in fp32 and once in each format")
    if plan.predictions < FEW_TOKENS:
        out.warning(f"{tokens} are few: what is chosen and measured on them may not hold for other texts")
    request = Request(state_dtype or "int8", given, target, sensitivity_tokens, seed)
    choice = choose(lm, plan, request, out.progress)
    beside = formats_beside(lm, choice, specs, seed)
    losses, loss_dtype = compare_losses(lm, plan, beside, out.progress), lm.dtype
    if dtype == "auto":
        del lm  # before the same weights come as they run
        lm = load("auto")
    costs = measure_costs(lm, beside, batch_size, out.progress)
    formats = [
        FormatReport(name, name == choice.format.name, cost, losses.get(name)) for name, cost in costs.items()
    ]
    report = Report(lm, loss_dtype, plan, text.name, choice, formats, target)
    try:
        if plot:
            plot_errors(formats, plot, f"{lm.name} on {text.title}")
        if output:
            with out.progress(1, "writing") as advance:
                written = write_quantized(
                    checkpoint, output, choice.format, choice.scales, overwrite, advance
                )
            out.note(
                f"{output}: {len(written.files)} files, {written.linked:,} bytes linked to the source's, "
                f"{written.copied:,} copied"
            )
    finally:  # what is measured is not lost where it cannot be written
        if json:
            out.json(document(report, output))
        else:
            print_report(report, out)
    if not output:
        out.hint("-o OUT writes the model with this choice in it")


def _parse_percent(text: str) -> float:
    """Return the share that "0.5%" means."""
    matched = re.fullmatch(r"(\d+\.?\d*|\.\d+) *%", text.strip())
    if not matched:
        raise typer.BadParameter(f"--target-ppl-increase: expected a percentage as 0.5%, got {text}")
    return float(matched[1]) / 100


def _read_text(calibrate: str | None, field: str) -> "Text":
    from mamba_cli.perplexity.texts import Text, read_text
    from mamba_cli.quantize.calibrate import built_in_text

    return read_text(calibrate, field) if calibrate else Text(BUILT_IN, [built_in_text()], has_headings=False)


def _plan(lm: "LanguageModel", text: "Text", max_tokens: int | None, window: int) -> "Plan":
    """Return the plan of reading the text token by token."""
    from mamba_cli.perplexity.plan import make_plan
    from mamba_cli.perplexity.tokens import encode_documents

    limit = max_tokens or MAX_TOKENS[lm.device.type]
    encoded = encode_documents(text.documents(split=False), lm.tokenizer, None, lm.config.vocab_size, limit)
    if (tokens := sum(len(document.ids) for document in encoded)) < 2:
        raise Mamba2Error(
            f"{text.title}: expected at least 2 tokens, one to read and one to predict, got {tokens}"
        )
    return make_plan(encoded, lm.tokenizer, "step", window)
