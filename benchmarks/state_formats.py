"""What an SSM state in few bits costs: on a text, on heads that remember long, and by a head's half-life.

    python benchmarks/state_formats.py text FILE int8 int8:nearest:1:uniform int4:outer --window 1024
    python benchmarks/state_formats.py stress
    python benchmarks/state_formats.py half-lives

Formats are named as --state-dtype names them. int5, which no kernel has, stands beside them to compare
with error feedback: int5:1 is int4 with what rounding took from each number carried along in one more bit.

These are the decode step's numbers: a state that is written every `window` tokens is what a prefill of
`window` tokens continues, so tokens are read in blocks, which is faster than the step by as much. Only the
stagger is left out: here all heads are written after the same token. And they are a float32 model's: in
bfloat16 the activations' rounding alone turns any change of the state, however small, into a mean change of
0.010 in a token's NLL, more than int8's own 0.003.
"""

import argparse
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from mamba_cli.language_model import LanguageModel
from mamba_cli.load import load_model
from mamba_cli.perplexity.plan import make_plan
from mamba_cli.perplexity.texts import read_text
from mamba_cli.perplexity.tokens import encode_documents
from mamba_cli.quantize.calibrate import built_in_text, calibrate
from mamba_cli.quantize.saved import Scales
from mamba_cli.state_format import parse_state_spec, recommended_format
from mamba_cli.state_recipe import choose_heads, predicted_error
from mamba_kernels.state_codes import FORMATS, ROUNDINGS, decode, encode, rounding_keys

HEADDIM, D_STATE = 4, 128  # of the simulated heads: rows are what counts, four of them are an average
EXTRA_BITS = {"int5": 5}


@dataclass(frozen=True)
class Format:
    """A format of a whole model: the dtype of each head of each layer, and when and how they are written."""

    heads: list[tuple[str, ...]]
    rounding: str
    window: int
    outer: bool

    @staticmethod
    def named(name: str, lm: LanguageModel, lives: Sequence[torch.Tensor | None]) -> "Format":
        dtype, _, words = name.partition(":")
        extra = dtype in EXTRA_BITS
        spec = parse_state_spec(f"int8:uniform:{words}".rstrip(":") if extra else name)
        layers = recommended_format(lm.config, lives, spec).layers
        heads = [(dtype,) * len(layer.heads) if extra else layer.heads for layer in layers]
        return Format(heads, layers[0].rounding, layers[0].window, spec.outer)

    @property
    def bits(self) -> float:
        """Mean bits of an element."""
        bits = [EXTRA_BITS.get(dtype) or FORMATS[dtype].bits for layer in self.heads for dtype in layer]
        return sum(bits) / len(bits)


class Rounder:
    """Rounds states (batch, nheads, headdim, d_state) to what their heads are stored in, and back."""

    def __init__(self, heads: tuple[str, ...], rounding: str, seed: int = 0):
        self.groups = {
            dtype: [h for h, own in enumerate(heads) if own == dtype] for dtype in dict.fromkeys(heads)
        }
        self.rounding, self.seed, self.count = rounding, seed, 0

    def __call__(self, state: torch.Tensor) -> torch.Tensor:
        rounded = torch.empty_like(state)
        for dtype, heads in self.groups.items():
            part = state[:, heads]
            rounded[:, heads] = self._round(part.flatten(0, 1), dtype).view_as(part)
        self.count += 1
        return rounded

    def _round(self, rows: torch.Tensor, dtype: str) -> torch.Tensor:
        if dtype in EXTRA_BITS:
            return _round_integers(rows, EXTRA_BITS[dtype], self.rounding)
        keys = None
        if self.rounding == "stochastic":
            index = torch.arange(len(rows), dtype=torch.int32)
            keys = rounding_keys(self.seed, torch.full_like(index, self.count), index)
        return decode(*encode(rows, dtype, keys), dtype, rows.shape[-1])


def _round_integers(rows: torch.Tensor, bits: int, rounding: str) -> torch.Tensor:
    scale = rows.abs().amax(-1, keepdim=True).clamp(min=1e-30) / ((1 << bits - 1) - 1)
    up = 0.5 if rounding == "nearest" else torch.rand(rows.shape)
    return torch.floor(rows / scale + up) * scale


def text(options: argparse.Namespace) -> None:
    """Change of perplexity and of a token's NLL against the fp32 state, read in windows of a text."""
    lm = load_model(options.model, device="cpu", dtype=options.dtype)
    ids = encoded(lm, read_text(options.file).documents(split=False)[0])
    starts = torch.linspace(0, len(ids) - options.window - 1, options.windows).long().tolist()
    rows = torch.stack([ids[start : start + options.window + 1] for start in starts])
    scales = calibrated(lm)
    lives = scales.half_lives if options.calibrate else lm.half_lives()
    reference = read(lm, rows, None, None)
    print(f"{len(reference)} tokens, perplexity with an fp32 state {reference.mean().exp():.4f}")
    print("format                       bits  change of perplexity  mean |change of NLL|, by quarter")
    for name in options.formats:
        begin, format = time.perf_counter(), Format.named(name, lm, lives)
        change = read(lm, rows, format, scales.columns if format.outer else None) - reference
        error = 100 * change.std() / math.sqrt(len(change))
        quarters = " ".join(f"{q.mean():.4f}" for q in change.abs().view(len(rows), -1).chunk(4, 1))
        counts = Counter(dtype for layer in format.heads for dtype in layer)
        print(
            f"{name:27} {format.bits:5.2f}  {100 * torch.expm1(change.mean()):+.4f}% +- {error:.4f}  "
            f"{change.abs().mean():.5f}, {quarters}  {dict(counts)} {time.perf_counter() - begin:.0f} s",
            flush=True,
        )


def encoded(lm: LanguageModel, text: str) -> torch.Tensor:
    return encode_documents([text], lm.tokenizer, None, lm.config.vocab_size)[0].ids


def calibrated(lm: LanguageModel) -> Scales:
    """Half-lives and column scales as quantize-state takes them where no text is named."""
    documents = encode_documents([built_in_text()], lm.tokenizer, None, lm.config.vocab_size)
    return calibrate(lm, make_plan(documents, lm.tokenizer, window=1024))


@torch.inference_mode()
def read(
    lm: LanguageModel,
    rows: torch.Tensor,
    format: Format | None,
    columns: Sequence[torch.Tensor | None] | None,
) -> torch.Tensor:
    """NLL of each token of rows (sequences, length + 1) after the first; format None: an fp32 state."""
    rounders = (
        [Rounder(heads, format.rounding, seed) for seed, heads in enumerate(format.heads)] if format else []
    )
    nll = []
    for batch in rows.split(8):
        state = lm.init_state(len(batch))
        hidden = []
        for block in batch[:, :-1].split(format.window if format else 64, 1):
            hidden.append(lm.model.prefill(block, state))
            for layer, rounder in enumerate(rounders):
                ssm = state.layers[layer].ssm
                factor = columns[layer][:, None] if columns else 1.0
                ssm.copy_(rounder(ssm / factor) * factor)
        # The head of all positions at once would be the largest tensor by far.
        for wanted, seen in zip(batch[:, 1:], torch.cat(hidden, 1), strict=True):
            for ids, part in zip(wanted.split(256), seen.split(256), strict=True):
                logits = lm.logits(part)[:, : lm.config.vocab_size].float()
                nll.append(F.cross_entropy(logits, ids, reduction="none").double())
    return torch.cat(nll)


STRESS = {
    "steady": "the same x and B at every token",
    "noisy": "x and B with noise of their own size",
    "remembered": "one token as large as all that follows, then the same small x and another B",
}


def inputs(case: str, tokens: int, half_life: float) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """x (HEADDIM,) and B (D_STATE,) of each token, float64."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=random)

    x, B, first = normal(HEADDIM), normal(D_STATE), normal(D_STATE)
    for token in range(tokens):
        if case == "noisy":
            yield x + normal(HEADDIM), B + normal(D_STATE)
        elif case == "random":
            yield normal(HEADDIM), normal(D_STATE)
        elif case == "remembered" and token == 0:
            yield x * half_life / math.log(2), first
        else:
            yield x, B


def follow(
    cases: Sequence[str], tokens: int, lives: torch.Tensor, heads: tuple[str, ...], rounding: str, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Relative errors of the state and of what is read from it, (windows, cases, nheads), after each window.

    Every head of a case gets the same inputs; head h forgets half in lives[h] tokens. The error is against
    float64.
    """
    decay = 2.0 ** (-1 / lives.double())
    ages = decay[:, None] ** torch.arange(window - 1, -1, -1)
    kept = (decay**window)[:, None, None]
    exact = torch.zeros(len(cases), len(heads), HEADDIM, D_STATE, dtype=torch.float64)
    stored, rounder = exact.float(), Rounder(heads, rounding)
    streams = [inputs(case, tokens, float(lives.max())) for case in cases]
    C = torch.randn(D_STATE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    of_state, of_output = [], []
    for _ in range(tokens // window):
        read = [next(stream) for _ in range(window) for stream in streams]
        x, B = (torch.stack(t).unflatten(0, (window, len(cases))) for t in zip(*read, strict=True))
        update = torch.einsum("hw,wcp,wcn->chpn", ages, x, B)
        exact = exact * kept + update
        stored = rounder(stored * kept.float() + update.float())
        error = stored - exact
        of_state.append(error.flatten(2).norm(dim=2) / exact.flatten(2).norm(dim=2))
        of_output.append((error @ C).norm(dim=2) / (exact @ C).norm(dim=2))
    return torch.stack(of_state), torch.stack(of_output)


def stress(options: argparse.Namespace) -> None:
    """Heads of a long half-life and small updates: formats all heads share, and what the recipes take."""
    life, tokens = options.half_life, options.tokens
    print(f"relative error in %, by quarter of {tokens} tokens, half-life {life:g} tokens: state | output")
    for case, meaning in STRESS.items():
        print(f"{case}: {meaning}")
    heads = ("int8", "fp8", "int4", "bf16", "fp16", "fp32")
    for window in (1, 8, 16):
        taken = [choose_heads(torch.tensor([life]), base, window)[0] for base in ("int8", "fp8", "int4")]
        print(f"window {window}: int8, fp8 and int4 take {', '.join(taken)} for such a head")
        for rounding in ROUNDINGS:
            errors = follow(tuple(STRESS), tokens, torch.full((len(heads),), life), heads, rounding, window)
            for index, case in enumerate(STRESS):
                for head, dtype in enumerate(heads):
                    quarters = [
                        [q.square().mean().sqrt() for q in e[:, index, head].chunk(4)] for e in errors
                    ]
                    text = " | ".join(" ".join(f"{100 * q:7.3f}" for q in of_one) for of_one in quarters)
                    print(f"  {window:2} {rounding:10} {case:10} {dtype:5} {text}", flush=True)


def sweep(options: argparse.Namespace) -> None:
    """Errors that random inputs leave at half-lives of 1 to 10,000 tokens, beside the recipe's formula."""
    lives = torch.tensor([1.0, 3, 10, 30, 60, 100, 300, 1000, 3000, 10000])
    window, tokens = 8, 30_000
    print(f"relative error of the state in %, last third of {tokens} tokens, window {window}")
    print("half-life".ljust(16), *(f"{life:8g}" for life in lives.tolist()))
    for dtype in ("int4", "fp8", "int8", "fp16"):
        found = {"predicted": predicted_error(lives, dtype, window)}
        for rounding in ROUNDINGS:
            errors, _ = follow(("random",), tokens, lives, (dtype,) * len(lives), rounding, window)
            found[rounding] = errors[2 * len(errors) // 3 :, 0].square().mean(0).sqrt()
        for name, values in found.items():
            print(f"{dtype:5} {name:10}", *(f"{100 * e:8.3f}" for e in values.tolist()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    on_text = commands.add_parser("text", help=text.__doc__)
    on_text.add_argument("file", metavar="FILE", help="the text")
    on_text.add_argument("formats", nargs="+")
    on_text.add_argument("--model", default="demo")
    on_text.add_argument("--dtype", default="float32")
    on_text.add_argument("--window", type=int, default=1024, help="tokens of a window")
    on_text.add_argument("--windows", type=int, default=48)
    on_text.add_argument(
        "--calibrate", action="store_true", help="half-lives as measured on a text, not by dt_bias"
    )
    on_text.set_defaults(run=text)
    on_stress = commands.add_parser("stress", help=stress.__doc__)
    on_stress.add_argument("--half-life", type=float, default=10_000)
    on_stress.add_argument("--tokens", type=int, default=20_000)
    on_stress.set_defaults(run=stress)
    commands.add_parser("half-lives", help=sweep.__doc__).set_defaults(run=sweep)
    options = parser.parse_args()
    with torch.inference_mode():
        options.run(options)


if __name__ == "__main__":
    main()
