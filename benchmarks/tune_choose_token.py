"""Choose the block sizes of the choice of a token, and time it beside torch's operations.

    PYTHONPATH=.:kernels:commands python benchmarks/tune_choose_token.py --out DIR

Every candidate is compiled and compared with torch first, in parallel processes that leave it in Triton's
cache. Then a CUDA graph makes several choices in a row, from the bf16 logits of the published vocabulary,
which lie in the L2 cache as they do after the projection that makes them.
"""

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tuning import DEVICE, Config, about, milliseconds, problems, short

from mamba_kernels.backend import use_backend
from mamba_kernels.choose_token import choose_token

CHOICES = 20  # of one graph
VOCABULARY = 50277, 50288
SMOKE_VOCABULARY = 301, 304
WAYS: dict[str, dict[str, float]] = {
    "greedy": {},
    "default": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "with a penalty": {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "repetition_penalty": 1.1},
    "top_k 200": {"temperature": 0.8, "top_k": 200, "top_p": 0.95},
    "top_p alone": {"temperature": 0.8, "top_p": 0.95},
    "temperature alone": {"temperature": 0.8},
}
BATCHES = (1, 8, 64)
# Choices of 64 rows that may differ from torch's: numbers on a boundary.
MOST_DIFFERENT = 1


class Run:
    """Logits, random numbers and memory of one batch."""

    def __init__(self, way: str, batch: int, smoke: bool):
        torch.manual_seed(0)
        self.options = WAYS[way]
        self.vocab_size, columns = SMOKE_VOCABULARY if smoke else VOCABULARY
        self.logits = (torch.randn(batch, columns, device=DEVICE) * 2.5).bfloat16()
        self.uniform = torch.rand(CHOICES, batch, dtype=torch.float64, device=DEVICE)
        self.token_ids, self.turn = (torch.zeros(batch, dtype=torch.long, device=DEVICE) for _ in range(2))
        self.seen = None
        if "repetition_penalty" in self.options:
            self.seen = torch.rand(batch, columns, device=DEVICE) < 0.01

    def choose(self, config: Config | None = None) -> None:
        choose_token(
            self.logits, self.token_ids, vocab_size=self.vocab_size, turn=self.turn, uniform=self.uniform,
            seen=self.seen, pdl=True, config=config, **self.options,
        )  # fmt: skip

    def several(self, config: Config | None = None) -> None:
        self.turn.zero_()
        for _ in range(CHOICES):
            self.choose(config)


def candidates(way: str, smoke: bool) -> list[Config | None]:
    """The default, and other warps of a program and blocks asked for at once: 16 bytes a thread of each."""
    sizes = ((2, 2),) if smoke else ((8, 8), (16, 4), (32, 4), (32, 8))
    if way not in ("greedy", "default"):
        sizes = ()
    return [None] + [{"BLOCK": 256 * warps, "UNROLL": unroll, "num_warps": warps} for warps, unroll in sizes]


def check(job: tuple[str, Config | None, bool]) -> str | None:
    """Compare one candidate with torch; return what is wrong."""
    way, config, smoke = job
    chosen = []
    for backend in ("torch", "triton"):
        run = Run(way, 4 if smoke else 64, smoke)
        with use_backend(backend):
            run.choose(config)
        chosen.append(run.token_ids)
    different = int((chosen[0] != chosen[1]).sum())
    return f"{different} rows differ from torch" if different > MOST_DIFFERENT else None


def microseconds(run: Run, backend: str, config: Config | None = None) -> float:
    with use_backend(backend):
        return 1e3 * milliseconds(partial(run.several, config), 0.02) / CHOICES


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for tune_choose_token.json")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, to try the script itself")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    jobs = [(way, config, options.smoke) for way in WAYS for config in candidates(way, options.smoke)]
    broken = {str(job): problem for job, problem in zip(jobs, problems(check, jobs), strict=True) if problem}
    for job, problem in broken.items():
        print(f"broken: {job}: {problem}")
    print(f"{len(jobs)} candidates compiled and compared in {time.perf_counter() - began:.0f} s", flush=True)

    rows: list[dict[str, Any]] = []
    for way in WAYS:
        for batch in BATCHES[:1] if options.smoke else BATCHES:
            run = Run(way, batch, options.smoke)
            with_torch = microseconds(run, "torch")
            print(f"{way}, batch {batch}: torch {with_torch:.1f} us")
            tried = {}
            for config in candidates(way, options.smoke):
                if str((way, config, options.smoke)) not in broken:
                    tried[short(config)] = microseconds(run, "triton", config)
            for name, us in sorted(tried.items(), key=lambda item: item[1]):
                print(f"  {us:6.1f} us  {name}")
            rows.append({"way": way, "batch": batch, "torch_us": with_torch, "us": tried})
    path = options.out / "tune_choose_token.json"
    path.write_text(json.dumps(about() | {"broken": broken, "rows": rows}, indent=1))
    print(f"{time.perf_counter() - began:.0f} s in all, details in {path}")


if __name__ == "__main__":
    main()
