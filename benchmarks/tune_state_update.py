"""Choose the block sizes of selective_state_update, and time it at batch 256.

    PYTHONPATH=.:kernels:commands python benchmarks/tune_state_update.py --out DIR

Every candidate is compiled and compared with torch first, then timed in a CUDA graph, beside a copy and a
scaling in place of its state. Mamba-2 has 80 heads x 64 x 128, Mamba-1 5120 channels x 16. Untied, A is a
whole matrix and not a number a head.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tuning import DEVICE, Config, about, milliseconds, problems, relative_error, short

from mamba_kernels.selective_state_update import selective_state_update_ref
from mamba_kernels.selective_state_update_triton import launch

CASES = (
    ("mamba2", torch.float32),
    ("mamba2", torch.bfloat16),
    ("mamba2 untied", torch.float32),
    ("mamba2 untied", torch.bfloat16),
    ("mamba1", torch.float32),
)
# Microseconds to beat and to aim at.
TARGETS = {CASES[0]: (345, 325), CASES[1]: (195, 170)}
# Rows of a tile, tiles and warps of a program, cache hints of the state's loads and stores.
TILES = {
    "mamba2": [
        (4, 2, 1, "", ""), (8, 1, 1, "", ""), (8, 1, 1, "evict_first", ".cs"), (8, 2, 1, "", ""),
        (8, 4, 1, "", ""), (8, 8, 1, "", ""), (16, 1, 1, "", ""), (16, 1, 1, "evict_first", ".cs"),
        (16, 1, 2, "", ""), (16, 2, 2, "", ""), (16, 4, 2, "", ""), (32, 1, 4, "", ""),
        (32, 2, 4, "", ""), (8, 4, 1, "evict_first", ".cs"),
    ],
    "mamba1": [(64, 1, 2, "", ""), (32, 1, 1, "", ""), (64, 1, 1, "", "")],
}  # fmt: skip

Job = tuple[str, torch.dtype, Config | None, bool]


def arguments(case: str, dtype: torch.dtype, batch: int, smoke: bool) -> list[Any]:
    """Random arguments of the operation."""
    nheads, headdim, d_state = (1, 5120, 16) if case == "mamba1" else (80, 64, 128)
    if smoke:
        nheads, headdim, d_state = 1 if case == "mamba1" else 2, 16, 16
    narrow = torch.bfloat16 if DEVICE == "cuda" else torch.float32

    def random(*size: int, kind: torch.dtype = narrow) -> torch.Tensor:
        return torch.empty(*size, dtype=kind, device=DEVICE).normal_()

    state = random(batch, nheads, headdim, d_state, kind=dtype if DEVICE == "cuda" else torch.float32)
    x, z = random(batch, nheads, headdim), random(batch, nheads, headdim)
    B, C = random(batch, 1, d_state), random(batch, 1, d_state)
    if case.startswith("mamba2"):
        dt = random(batch, nheads)[..., None].expand(-1, -1, headdim)
        dt_bias, D = (random(nheads, kind=torch.float32)[:, None].expand(-1, headdim) for _ in range(2))
        A = (-random(nheads, kind=torch.float32).exp())[:, None, None].expand(-1, headdim, d_state)
        A = A.contiguous() if case == "mamba2 untied" else A
    else:
        dt, dt_bias, D = random(batch, nheads, headdim), random(nheads, headdim), random(nheads, headdim)
        A = -random(nheads, headdim, d_state, kind=torch.float32).exp()
    return [state, x, dt, A, B, C, D, z, dt_bias, True, None]


def candidates(case: str, smoke: bool) -> list[Config | None]:
    return [None] + [
        {"BLOCK_P": rows, "TILES": count, "num_warps": warps, "LOAD": load, "STORE": store}
        for rows, count, warps, load, store in TILES[case.split()[0]][: 2 if smoke else None]
    ]


def compare(job: Job) -> str | None:
    """Run a candidate beside torch; return what is wrong with it, if anything."""
    case, dtype, config, smoke = job
    torch.manual_seed(0)
    state, *others = arguments(case, dtype, 2, smoke)
    kept = state.clone()
    out = launch(state, *others, None, "mamba", config)
    expected = selective_state_update_ref(kept, *others)
    errors = relative_error(out, expected), relative_error(state, kept)
    return None if all(error < 0.01 for error in errors) else f"relative errors {errors} against torch"


def time_case(case: str, dtype: torch.dtype, smoke: bool, configs: list[Config | None]) -> list[dict]:
    args = arguments(case, dtype, 2 if smoke else 256, smoke)
    state = args[0]
    must, aim = TARGETS.get((case, dtype), (None, None))
    print(f"state update {case} {dtype}: must {must}, aim {aim} us")
    copied = torch.empty_like(state)
    for name, work in (("copy", partial(copied.copy_, state)), ("in place", partial(state.mul_, 0.999))):
        us = 1e3 * milliseconds(work)
        print(f"  {us:7.1f} us {2 * state.nbytes / us / 1e3:5.0f} GB/s  for comparison: {name}")
    trials = []
    for config in configs:
        us = 1e3 * milliseconds(partial(launch, *args, None, "mamba", config))
        rate = 2 * state.nbytes / us / 1e3
        trials.append({"case": case, "state": str(dtype), "config": config, "us": us, "GB/s": rate})
    for trial in sorted(trials, key=lambda trial: trial["us"]):
        print(f"  {trial['us']:7.1f} us {trial['GB/s']:5.0f} GB/s  {short(trial['config'])}")
    return trials


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for tune_state_update.json")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, to try the script itself")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    jobs = [(*case, config, options.smoke) for case in CASES for config in candidates(case[0], options.smoke)]
    found = problems(compare, jobs)
    trials = []
    for case in CASES:
        configs = []
        for (*its_case, config, _), problem in zip(jobs, found, strict=True):
            if tuple(its_case) == case and problem is None:
                configs.append(config)
            elif tuple(its_case) == case:
                print(f"broken: {case} {short(config)}: {problem}")
        trials += time_case(*case, options.smoke, configs)
    (options.out / "tune_state_update.json").write_text(json.dumps(about() | {"trials": trials}, indent=1))


if __name__ == "__main__":
    main()
