"""`mamba2 generate`: continue a text."""

import os
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mamba_cli.errors import Mamba2Error
from mamba_cli.sampling import SamplingParams
from mamba_commands.options import (
    BackendOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelOption,
    QuietOption,
    RevisionOption,
    SeedOption,
    StateDtypeOption,
    TokenizerOption,
    VerboseOption,
    check_state_dtype,
    choose_model,
)
from mamba_commands.output import Output, is_terminal

if TYPE_CHECKING:
    from mamba_cli.generation import Generation
    from mamba_cli.language_model import LanguageModel
    from mamba_cli.tokenizer import Tokenizer


def generate(
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", "-p", metavar="TEXT", help="The text to continue; - reads it from stdin."),
    ] = None,
    prompt_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="A file with the text to continue; - is stdin.")
    ] = None,
    model: ModelOption = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", metavar="N", min=0, help="Stop after N tokens.")
    ] = 128,
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Stop right before TEXT; may be given several times."),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Do not stop at the model's end-of-text token.")
    ] = False,
    num_samples: Annotated[
        int, typer.Option(metavar="N", min=1, help="Write N different continuations.")
    ] = 1,
    echo: Annotated[bool, typer.Option("--echo", help="Write the prompt too, before the new text.")] = False,
    temperature: Annotated[
        float, typer.Option(metavar="T", help="Lower is more predictable; at 0 no chance is left.")
    ] = SamplingParams.temperature,
    top_k: Annotated[
        int, typer.Option(metavar="K", help="Choose among the K most likely tokens; 0 is off.")
    ] = SamplingParams.top_k,
    top_p: Annotated[
        float,
        typer.Option(
            metavar="P",
            help="Choose among the most likely tokens that together have probability P; 1 is off.",
        ),
    ] = SamplingParams.top_p,
    min_p: Annotated[
        float,
        typer.Option(metavar="P", help="Drop tokens less likely than P times the most likely one; 0 is off."),
    ] = SamplingParams.min_p,
    repetition_penalty: Annotated[
        float, typer.Option(metavar="R", help="Above 1, tokens of the text so far become less likely.")
    ] = SamplingParams.repetition_penalty,
    seed: SeedOption = None,
    json: JsonOption = False,
    tokenizer: TokenizerOption = None,
    revision: RevisionOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    backend: BackendOption = "auto",
    state_dtype: StateDtypeOption = None,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Continue a text with a model.

    The text to continue is --prompt, --prompt-file, or what is piped in; from a file or a pipe it
    loses the newline at its end. The continuation goes to stdout as it is made, and a line with its
    speed to stderr.
    """
    out = Output(quiet=quiet, verbose=verbose)
    params = _sampling_params(repetition_penalty, temperature, top_k, top_p, min_p)
    if "" in (stop or ()):
        raise typer.BadParameter("--stop: expected a text, got an empty one")
    text = _read_prompt(prompt, prompt_file, out)
    seed = secrets.randbits(32) if seed is None else seed
    check_state_dtype(state_dtype)

    from mamba_cli import generation, load_model

    lm = load_model(
        choose_model(model, out),
        device,
        dtype,
        revision=revision,
        backend=backend,
        tokenizer=tokenizer,
        state_dtype=state_dtype,
    )
    out.detail(f"{lm.name}: {_runtime(lm)}, state in {lm.state_dtype}")
    streaming = num_samples == 1 and not json
    if streaming and echo:
        out.data(text, end="")
    events = generation.generate(
        lm,
        _prompt_ids(text, lm.tokenizer),
        params,
        max_new_tokens=max_new_tokens,
        stop=stop or (),
        ignore_eos=ignore_eos,
        num_samples=num_samples,
        seed=seed,
    )
    try:
        for event in events:
            if isinstance(event, generation.Generation):
                result = event
            elif streaming:
                out.data(event.text, end="")
    except KeyboardInterrupt:
        if streaming and is_terminal(sys.stdout):
            out.data("")  # so that the shell's prompt does not continue the text
        raise

    prefix = text if echo else ""
    if json:
        out.json(_document(lm, result, seed, prefix))
    elif not streaming:
        # Told apart as head and tail tell files apart.
        texts = (
            f"==> {number} of {num_samples} <==\n{prefix}{sample.text}\n"
            for number, sample in enumerate(result.samples, 1)
        )
        out.data("\n".join(texts), end="")
    elif prefix + result.samples[0].text:
        out.data("")
    out.note(_figures(lm, result, seed))


def _sampling_params(*values: Any) -> SamplingParams:
    try:
        return SamplingParams(*values)
    except Mamba2Error as error:
        raise typer.BadParameter("--" + error.message.replace("_", "-", 1)) from None


def _read_prompt(prompt: str | None, prompt_file: str | None, out: Output) -> str:
    """Return the prompt: of the option given, else what is piped in, else nothing.

    A file or a pipe loses the one newline that editors and echo put at its end.
    """
    if prompt is not None and prompt_file is not None:
        raise typer.BadParameter("--prompt: expected no --prompt-file beside it, got both")
    if prompt is not None and prompt != "-":
        return _text(os.fsencode(prompt), "--prompt")
    if prompt_file is not None and prompt_file != "-":
        return _text(Path(prompt_file).read_bytes(), prompt_file).removesuffix("\n")
    if sys.stdin is None or (prompt is None and prompt_file is None and sys.stdin.isatty()):
        out.note("note: no prompt given: starting from an empty one; --prompt TEXT gives one")
        return ""
    return _text(sys.stdin.buffer.read(), "standard input").removesuffix("\n")


def _text(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Mamba2Error(
            f"{source}: expected UTF-8 text, got byte 0x{data[error.start]:02x} at {error.start}"
        ) from error


def _prompt_ids(text: str, tokenizer: "Tokenizer") -> list[int]:
    """Return the ids to start from; an empty prompt is the beginning, or the end, of a text."""
    ids = tokenizer.encode(text)
    if ids:
        return ids
    start = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
    if start is None:
        raise Mamba2Error("prompt: expected a text, as the tokenizer has no BOS or EOS token, got none")
    return [start]


def _document(lm: "LanguageModel", result: "Generation", seed: int, prefix: str) -> dict[str, Any]:
    """Return what --json writes. One sample lies at the top, several under "samples"."""
    samples = [
        {
            "text": prefix + sample.text,
            "token_ids": sample.token_ids,
            "finish_reason": sample.finish_reason,
            "generated_tokens": len(sample.token_ids),
        }
        for sample in result.samples
    ]
    figures = {
        "prompt_tokens": result.prompt_tokens,
        "generated_tokens": result.generated_tokens,
        "prefill_tokens_per_second": _rounded(result.prefill_tokens_per_second),
        "decode_tokens_per_second": _rounded(result.decode_tokens_per_second),
        "model": lm.name,
        "backend": lm.backend,
        "device": str(lm.device),
        "dtype": _dtype(lm),
        "state_dtype": lm.state_dtype,
        "seed": seed,
    }
    return (samples[0] if len(samples) == 1 else {"samples": samples}) | figures


def _figures(lm: "LanguageModel", result: "Generation", seed: int) -> str:
    rate = result.decode_tokens_per_second
    return (
        f"prompt {result.prompt_tokens} tok, {result.prefill_tokens_per_second:.0f} tok/s; "
        f"generated {result.generated_tokens} tok" + (f", {rate:.1f} tok/s" if rate is not None else "")
    ) + f"; {_runtime(lm)}; seed {seed}"


def _runtime(lm: "LanguageModel") -> str:
    return f"{lm.backend} on {lm.device} in {_dtype(lm)}"


def _dtype(lm: "LanguageModel") -> str:
    return str(lm.dtype).removeprefix("torch.")


def _rounded(rate: float | None) -> float | None:
    return None if rate is None else round(rate, 2)
