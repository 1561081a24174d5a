"""`mamba2 eval-ppl`: perplexity of a text, with everything that defines the number beside it."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mamba_commands.eval_ppl_tables import print_comparison, print_figures, print_positions
from mamba_commands.options import (
    LARGEST_COUNT,
    BackendOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelOption,
    QuietOption,
    RevisionOption,
    StateDtypeOption,
    TokenizerOption,
    VerboseOption,
    check_state_dtype,
    choose_model,
    parse_count,
)
from mamba_commands.output import Output

if TYPE_CHECKING:
    from mamba_cli.language_model import LanguageModel
    from mamba_cli.perplexity.evaluate import Progress
    from mamba_cli.perplexity.plan import Plan
    from mamba_cli.perplexity.tokens import Extent

# What --reference names: this model in another dtype, or with another state, or another model.
ReferenceKind = Literal["dtype", "state", "model"]


def eval_ppl(
    text: Annotated[
        str,
        typer.Argument(
            metavar="TEXT",
            help="wikitext, wikitext-103, lambada, a .txt, .jsonl or .parquet file, - for stdin, or a data "
            "set of the hub as owner/name[:config][:split].",
        ),
    ],
    field: Annotated[
        str,
        typer.Option(metavar="NAME", help="Key or column that holds a row's text."),
    ] = "text",
    documents: Annotated[
        bool,
        typer.Option(
            "--documents",
            help="Score each document alone: a row, or a WikiText article. Without it all is one text, rows "
            "joined by a blank line.",
        ),
    ] = False,
    prefix: Annotated[
        Literal["none", "bos", "eos"],
        typer.Option(
            metavar="TOKEN",
            help="Token put before each document: none, bos or eos. Without one its first token is not "
            "scored.",
        ),
    ] = "none",
    max_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Read only the text's first N tokens."),
    ] = None,
    max_windows: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Score only the first N windows."),
    ] = None,
    mode: Annotated[
        Literal["window", "carry", "step"],
        typer.Option(
            metavar="MODE",
            help="window: rolling windows, each from an empty state; carry: one pass, the state carried "
            "through each document; step: the windows one token at a time, as generate decodes.",
        ),
    ] = "window",
    window: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="Tokens read together; carry: tokens a chunk."),
    ] = 2048,
    stride: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Tokens from one window's start to the next; the window's length unless given.",
        ),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL_OR_DTYPE",
            help="Compare with another model, with this one in float32, bfloat16, float16 or float64 (its "
            "state in fp32), or with this one as it is but for its state: fp32, bf16, int8 or other words of "
            "--state-dtype.",
        ),
    ] = None,
    by_position: Annotated[
        bool,
        typer.Option("--by-position", help="Also by tokens read, in powers of two."),
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw --by-position into a .png or .svg file (needs matplotlib)."),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Keep what is scored in FILE, and continue from it to the same number. In mode carry a "
            "document that was not finished begins again.",
        ),
    ] = None,
    batch_size: Annotated[
        str,
        typer.Option(metavar="N", help="Windows side by side, or auto."),
    ] = "auto",
    model: ModelOption = None,
    tokenizer: TokenizerOption = None,
    revision: RevisionOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    backend: BackendOption = "auto",
    state_dtype: StateDtypeOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Measure a model's perplexity on a text.

    Every token is scored exactly once, but for a document's first one where no prefix token stands
    before it; the mean is over tokens. The result says what was measured: window, stride, prefix
    token, how rows were joined, tokens scored. With -q it is the perplexity alone, for scripts.

    Under torchrun the windows are shared out over the processes and the first one prints the result.
    """
    if stride is not None and mode == "carry":
        raise typer.BadParameter("--stride: expected none with --mode carry, which reads every token once")
    if stride is not None and stride > window:
        raise typer.BadParameter(f"--stride: expected at most the window's {window} tokens, got {stride}")
    windows_at_once = _parse_batch_size(batch_size)
    check_state_dtype(state_dtype)
    reference_kind = _kind_of_reference(reference)

    from mamba_cli.perplexity.compare import compare
    from mamba_cli.perplexity.distributed import join_processes
    from mamba_cli.perplexity.evaluate import evaluate
    from mamba_cli.perplexity.plan import make_plan
    from mamba_cli.perplexity.plot import check_plot, plot_positions
    from mamba_cli.perplexity.report import measure_by_position, strict, summarise
    from mamba_cli.perplexity.texts import read_text
    from mamba_cli.perplexity.tokens import encode_documents, measure_extent, prefix_token

    if plot:
        check_plot(plot)
    with join_processes() as processes:
        out = Output(quiet=quiet or not processes.reports, verbose=verbose and processes.reports)
        if text == "-" and processes.size > 1:
            raise typer.BadParameter("TEXT: expected a file for several processes to read, got -")
        source = read_text(text, field)
        place, name = processes.device(device), choose_model(model, out)
        lm, other = _load_models(
            name, reference, reference_kind, place, dtype, revision, backend, tokenizer, state_dtype
        )
        token = prefix_token(lm.tokenizer, prefix)
        texts = source.documents(documents)
        encoded = encode_documents(texts, lm.tokenizer, token, lm.config.vocab_size, max_tokens)
        plan = make_plan(encoded, lm.tokenizer, mode, window, stride, max_windows, source.title)
        out.detail(f"{lm.name}: {_describe(lm)}, {len(plan.windows)} windows, {plan.predictions} predictions")
        if mode != "step" and (lm.state_format or lm.ssm_dtype):
            out.note(
                f"note: in mode {mode} a state in {lm.state_dtype} is rounded only between blocks of text; "
                "--mode step rounds it as decoding does"
            )
        out.detail(f"first ids: {' '.join(map(str, plan.documents[0].ids[:16].tolist()))}")
        with _progress(out, plan.predictions) as progress:
            scores = evaluate(lm, plan, windows_at_once, other, resume, processes, progress)
    if not processes.reports:
        return

    extent = measure_extent(plan.documents, lm.tokenizer)
    figures = summarise(scores, plan, extent)
    positions = measure_by_position(scores, plan) if by_position or plot else []
    comparison = compare(scores, plan) if other else None
    definition = {
        "text": source.name,
        "joining": source.joining(documents),
        "prefix": prefix,
        "prefix_token_id": token,
        **_definition(plan, extent),
    }
    if plot:
        plot_positions(positions, plot, f"{lm.name} on {source.name}")
    if json:
        document: dict[str, Any] = {
            **asdict(figures),
            **definition,
            "model": lm.name,
            **_runtime(lm),
            "batch_size": scores.batch_size,
            "processes": processes.size,
            "seconds": round(scores.seconds, 3),
            "tokens_per_second": round(scores.tokens_per_second, 1),
        }
        if positions:
            document["by_position"] = [_without_none(asdict(position)) for position in positions]
        if other and comparison:
            document["reference"] = {"model": other.name, **_runtime(other), **asdict(comparison)}
        out.json(strict(document))
    elif quiet:
        out.data(repr(figures.perplexity))
    else:
        print_figures(out, figures)
        if other and comparison:
            dtype = "{dtype}, state in {state_dtype}".format(**_runtime(other))
            print_comparison(out, comparison, f"{other.name} in {dtype}")
        if positions:
            print_positions(out, positions)
        out.data("")
        out.table(("definition", "value"), list(_without_none(definition).items()))
        out.note(f"{scores.tokens_per_second:.0f} tokens/s in {scores.seconds:.1f} s, {_describe(lm)}")


def _parse_batch_size(value: str) -> int | None:
    """Return the number, None for "auto"."""
    if value == "auto":
        return None
    if (count := parse_count(value)) is None:
        raise typer.BadParameter(
            f"--batch-size: expected auto or a number from 1 to {LARGEST_COUNT}, got {value}"
        )
    return count


def _kind_of_reference(reference: str | None) -> ReferenceKind | None:
    """Return what is named; refuse, as wrong usage, what is no dtype, no format of a state and no name that
    a model can have.
    """
    if reference is None:
        return None
    from mamba_cli.hub import EMBEDDED, REPO_ID
    from mamba_cli.load import DTYPES
    from mamba_kernels.packed_state import STATE_DTYPES

    if reference in DTYPES:
        return "dtype"
    if reference.split(":")[0] in STATE_DTYPES:
        check_state_dtype(reference, "--reference")
        return "state"
    if reference == EMBEDDED or REPO_ID.fullmatch(reference) or Path(reference).expanduser().exists():
        return "model"
    raise typer.BadParameter(
        f"--reference: expected a dtype ({', '.join(DTYPES)}), a format of the state "
        f"({', '.join(STATE_DTYPES)}) or a model (a folder or owner/name), got {reference}"
    )


def _load_models(
    name: str,
    reference: str | None,
    reference_kind: ReferenceKind | None,
    device: str,
    dtype: str,
    revision: str | None,
    backend: str,
    tokenizer: str | None,
    state_dtype: str | None,
) -> "tuple[LanguageModel, LanguageModel | None]":
    """Return the model and its reference: the same one in another dtype, or another in the same."""
    from mamba_cli import load_model

    lm = load_model(
        name,
        device,
        dtype,
        revision=revision,
        backend=backend,
        tokenizer=tokenizer,
        state_dtype=state_dtype,
    )
    if reference is None:
        return lm, None
    if reference_kind == "dtype":
        return lm, load_model(name, device, reference, revision=revision, backend=backend, state_dtype="fp32")
    if reference_kind == "state":
        return lm, lm.with_state(reference, lm.columns)
    return lm, load_model(reference, device, dtype, backend=backend)


def _definition(plan: "Plan", extent: "Extent") -> dict[str, Any]:
    from mamba_cli.perplexity.report import STDERR_METHODS

    return {
        "unit": "token",
        "mode": plan.mode,
        "window": plan.window,
        "stride": plan.stride,
        "windows": len(plan.blocks),
        "documents": len(plan.documents),
        "text_tokens": extent.tokens,
        "bytes": extent.bytes,
        "words": extent.words,
        "stderr_method": STDERR_METHODS[plan.mode],
    }


def _runtime(lm: "LanguageModel") -> dict[str, str]:
    return {
        "dtype": str(lm.dtype).removeprefix("torch."),
        "state_dtype": lm.state_dtype,
        "device": str(lm.device),
        "backend": lm.backend,
    }


def _describe(lm: "LanguageModel") -> str:
    return "{dtype} on {device} ({backend}), state in {state_dtype}".format(**_runtime(lm))


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


@contextlib.contextmanager
def _progress(out: Output, total: int) -> "Iterator[Progress]":
    with out.progress(total, "perplexity") as advance:
        yield lambda tokens, nll: advance(tokens, f"perplexity {math.exp(min(nll, 700)):.4f}")
