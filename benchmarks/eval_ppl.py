"""Perplexity of a text by eval-ppl beside transformers on the same model, text and windows, in one run.

    python benchmarks/eval_ppl.py FILE --model demo --window 512 --tokens 8193

transformers scores window by window, the loop of its own documentation: one forward pass with all the
logits, then the cross entropy in fp32. Both sums of NLL are compared before any speed is printed. The
two sides take turns, and the best of the rounds counts, so that other load hits both alike.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers

from mamba_cli.convert import convert
from mamba_cli.load import DTYPES, load_model
from mamba_cli.perplexity.evaluate import evaluate
from mamba_cli.perplexity.plan import MODES, Plan, make_plan
from mamba_cli.perplexity.statistics import exact_sum
from mamba_cli.perplexity.texts import read_text
from mamba_cli.perplexity.tokens import encode_documents

AGREEMENT = {torch.float32: 1e-5, torch.bfloat16: 1e-3}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", help="what eval-ppl takes as its text")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--mode", default="window", choices=[mode for mode in MODES if mode != "carry"])
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=8193)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    ours = load_model(options.model, options.device, options.dtype)
    documents = encode_documents(
        read_text(options.text).documents(False), ours.tokenizer, None, ours.config.vocab_size, options.tokens
    )
    plan = make_plan(documents, ours.tokenizer, options.mode, options.window)
    with tempfile.TemporaryDirectory() as folder:
        convert(options.model, Path(folder) / "hf", "hf")
        theirs = transformers.Mamba2ForCausalLM.from_pretrained(
            Path(folder) / "hf", dtype=DTYPES[options.dtype]
        ).to(ours.device)

    sides: dict[str, Callable[[], float]] = {
        "ours": lambda: exact_sum(evaluate(ours, plan, options.batch_size).nll),
        "transformers": lambda: score_by_transformers(theirs, plan, ours.config.vocab_size),
    }
    nll = {name: run() for name, run in sides.items()}  # also the warm-up
    difference = abs(nll["ours"] / nll["transformers"] - 1)
    if difference > AGREEMENT[ours.dtype]:
        raise SystemExit(f"the sums of NLL disagree by {difference:.2g}: {nll}")

    best = dict.fromkeys(sides, float("inf"))
    for _ in range(options.rounds):
        for name, run in sides.items():
            best[name] = min(best[name], seconds_of(run))
    speed = {name: plan.predictions / seconds for name, seconds in best.items()}
    print(
        f"{options.model} {options.dtype} on {ours.device} ({ours.backend}), mode {options.mode}, window "
        f"{options.window}, {plan.predictions} predictions, {options.threads} threads, "
        f"torch {torch.__version__}, transformers {transformers.__version__}"
    )
    print(
        f"ours {speed['ours']:.0f} tok/s   transformers {speed['transformers']:.0f} tok/s   "
        f"ratio {speed['ours'] / speed['transformers']:.2f}   NLL agrees to {difference:.1g}"
    )
    print(json.dumps({"tokens_per_second": speed, "nll_sum": nll}))


@torch.inference_mode()
def score_by_transformers(model: torch.nn.Module, plan: Plan, vocab_size: int) -> float:
    """Return the summed NLL of the plan's windows, one forward pass a window."""
    total = 0.0
    for window in plan.windows:
        ids = plan.documents[window.document].ids[window.start : window.stop + 1].to(model.device)
        logits = model(ids[None, :-1]).logits[0, window.scored - window.start :, :vocab_size]
        total += F.cross_entropy(
            logits.float(), ids[1 + window.scored - window.start :], reduction="sum"
        ).item()
    return total


def seconds_of(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
