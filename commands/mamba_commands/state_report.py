"""What quantize-state found, as tables for people, tab-separated for programs, or one JSON document."""

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mamba_commands.log_axis import short
from mamba_commands.output import Output, is_terminal

if TYPE_CHECKING:
    import torch

    from mamba_cli.language_model import LanguageModel
    from mamba_cli.perplexity.plan import Plan
    from mamba_cli.quantize.report import FormatReport, Loss
    from mamba_cli.quantize.study import Choice


@dataclass(frozen=True)
class Report:
    """Everything that is shown.

    lm: what was timed; loss_dtype: of the model whose losses were measured on `text`; target: a share of
    the perplexity, or None.
    """

    lm: "LanguageModel"
    loss_dtype: "torch.dtype"
    plan: "Plan"
    text: str
    choice: "Choice"
    formats: "Sequence[FormatReport]"
    target: float | None


def document(report: Report, output: Path | None) -> dict[str, Any]:
    """Return the report as strict JSON; an infinite number (a half-life) is null."""
    from mamba_cli.perplexity.report import strict
    from mamba_cli.quantize.section import write_section

    choice = report.choice
    return strict(
        {
            "model": report.lm.name,
            "output": None if output is None else str(output),
            "state_quantization": write_section(choice.format, choice.outer),
            "target_ppl_increase": report.target,
            "widened_layers": list(choice.widened),
            "formats": [asdict(one) for one in report.formats],
            "layers": _layers(report),
            **_definition(report),
        }
    )


def print_report(report: Report, out: Output) -> None:
    """Print the tables: what each format costs, what it loses, where, and each layer."""
    from mamba_cli.quantize.section import describe

    _title("Cost", out, first=True)
    _print_costs(report.formats, out)
    measured = [one for one in report.formats if one.loss]
    if measured:
        _title("Loss against the state in fp32 (* the chosen format)", out)
        _print_losses(measured, out)
        _title("Mean change of a token's NLL, by tokens read", out)
        _print_positions(measured, out)
    _title(f"Layers in {report.choice.format.name}: half-life on the text, KL of each alone", out)
    _print_layers(report, out)
    _title("Chosen, and how it was measured", out)
    words = {"format": report.choice.format.name} | describe(report.choice.format, report.choice.outer)
    if report.target is not None:
        words["perplexity increase"] = f"at most {100 * report.target:g}%"
        words["widened layers"] = ", ".join(map(str, sorted(set(report.choice.widened)))) or "none"
    out.table(("definition", "value"), list((words | _definition(report)).items()))


def _title(text: str, out: Output, first: bool = False) -> None:
    """Part tables by an empty line and a title; in a pipe by the line alone, so that only tables come out."""
    if is_terminal(sys.stdout):
        out.data(text if first else f"\n{text}")
    elif not first:
        out.data("")


def _name(report: "FormatReport") -> str:
    return f"{report.name} *" if report.chosen else report.name


def _print_costs(formats: "Sequence[FormatReport]", out: Output) -> None:
    group = "{:,}" if is_terminal(sys.stdout) else "{}"
    rows = [
        (
            _name(one),
            group.format(one.cost.state_bytes),
            "-" if one.cost.sequences is None else group.format(one.cost.sequences),
            f"{one.cost.milliseconds:.4g}",
        )
        for one in formats
    ]
    out.table(("format", "bytes/sequence", "sequences", f"ms/step of {formats[0].cost.batch}"), rows)


def _print_losses(formats: "Sequence[FormatReport]", out: Output) -> None:
    rows = [
        (
            _name(one),
            f"{one.loss.perplexity:.6g}",
            _percent(one.loss.change),
            "-" if one.loss.change_stderr is None else _percent(one.loss.change_stderr).lstrip("+"),
            f"{one.loss.kl:.2g}",
            f"{one.loss.same_top:.2%}",
            f"{one.loss.nll_change:.2g}",
        )
        for one in formats
    ]
    out.table(("format", "ppl", "change", "+-", "KL", "top-1", "|dNLL|"), rows)


def _print_positions(formats: "Sequence[FormatReport]", out: Output) -> None:
    """A line for each stretch of positions, a column for each format, and how the error grows last."""
    losses: list[Loss] = [one.loss for one in formats if one.loss]
    rows: list[tuple[str, ...]] = [
        (f"{at[0].first}-{at[0].last}", *(f"{position.nll_change:.2g}" for position in at))
        for at in zip(*(loss.positions for loss in losses), strict=True)
    ]
    rows.append(("growth", *("-" if loss.growth is None else f"{loss.growth:.2f}" for loss in losses)))
    out.table(("tokens read", *map(_name, formats)), rows)


def _print_layers(report: Report, out: Output) -> None:
    write = short if is_terminal(sys.stdout) else "{:.6g}".format
    rows = []
    for layer in _layers(report):
        if layer["heads"] is None:
            rows.append((layer["layer"], "attention", "-", "-", "-"))
            continue
        lives = (write(layer[key]) for key in ("half_life_median", "half_life_max"))
        kl = "-" if layer["kl"] is None else f"{layer['kl']:.2g}"
        rows.append((layer["layer"], layer["heads"], *lives, kl))
    out.table(("layer", "heads", "median", "longest", "KL"), rows)


def _layers(report: Report) -> list[dict[str, Any]]:
    from mamba_cli.quantize.section import describe_heads

    alone = {layer.layer: layer for layer in report.choice.layers}
    rows = []
    for index, (layer, lives) in enumerate(
        zip(report.choice.format.layers, report.choice.measured.half_lives, strict=True)
    ):
        found = alone.get(index)
        rows.append(
            {
                "layer": index,
                "heads": None if layer is None else describe_heads(layer.heads),
                "half_life_min": None if lives is None else lives.min().item(),
                "half_life_median": None if lives is None else lives.median().item(),
                "half_life_max": None if lives is None else lives.max().item(),
                "kl": found and found.kl,
                "nll_change": found and found.nll_change,
            }
        )
    return rows


def _definition(report: Report) -> dict[str, Any]:
    plan, lm = report.plan, report.lm
    free = "fit the GPU's free memory" if lm.device.type == "cuda" else "fit the machine's free memory"
    found: dict[str, Any] = {
        "text": report.text,
        "tokens": plan.predictions,
        "window": plan.window,
        "windows": len(plan.windows),
        "mode": plan.mode,
        "sequences": free + ("" if lm.config.attention is None else ", without keys and values"),
        "device": str(lm.device),
        "backend": lm.backend,
        "dtype": str(lm.dtype).removeprefix("torch."),
        "loss_dtype": str(report.loss_dtype).removeprefix("torch."),
    }
    return found


def _percent(share: float) -> str:
    """Write a change in three decimals of a percent, or two digits where it is large."""
    percent = 100 * share
    if not math.isfinite(percent):
        return f"{percent}"
    return f"{percent:+.3f}%" if abs(percent) < 10 else f"{percent:+.3g}%"
