"""Choose the block sizes of the convolution and norm kernels, and time them.

    PYTHONPATH=.:kernels:commands python benchmarks/tune_conv_norm.py --out DIR [--only TEXT]

Every candidate is compiled and compared with torch first, in parallel processes that leave it in Triton's
cache; one that fails is reported and left out. Each is then timed in a CUDA graph whose launches go over
copies of the inputs that together pass the L2 cache. The first candidate of a case is what config_for
chooses today.
"""

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from mamba_kernels import (
    causal_conv1d_bwd_triton,
    causal_conv1d_triton,
    causal_conv1d_update_triton,
    rmsnorm_triton,
)
from mamba_kernels.causal_conv1d import causal_conv1d_ref, causal_conv1d_update_ref
from mamba_kernels.rmsnorm import add_norm_ref, rmsnorm_ref

Config = dict[str, Any]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
L2_BYTES = 60 * 2**20
# By conv_dim, of the 130m and the 2.7b model: in_proj's columns, and where those of the convolution start.
IN_PROJ = {1792: (3352, 1536), 5376: (10576, 5120)}
TOLERANCE = 1e-2  # relative RMS error in bfloat16, whose rounding alone gives 2e-3


@dataclass
class Case:
    """One kernel at one shape: `run(inputs, config)` launches it, `reference` is the same in torch."""

    make: Callable[[], tuple]
    run: Callable[[tuple, Config | None], Any]
    reference: Callable[[tuple], Any]
    bytes: int  # that any implementation has to read and write
    candidates: list[Config]
    target: str = ""


def random(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*size, device=DEVICE, dtype=torch.float32).to(dtype)


def tiles(names: str, *values: tuple[int, ...]) -> list[Config]:
    """Configurations from the names of their entries, in order, and rows of values."""
    return [dict(zip(names.split(), row, strict=True)) for row in values]


CHANNEL_LAST = "RUNS STEPS BLOCK_D num_warps"


def convolution(batch: int, dim: int, seqlen: int, candidates: list[Config], first=False, target="") -> Case:
    def make() -> tuple:
        if first:
            x = random(batch, dim, seqlen)
        else:  # as the model has it: columns of in_proj's output
            columns, start = IN_PROJ.get(dim, (2 * dim, dim))
            x = random(batch, seqlen, columns)[..., start : start + dim].transpose(1, 2)
        return x, random(dim, 4), random(dim)

    return Case(
        make,
        lambda a, config: causal_conv1d_triton.causal_conv1d_fwd(*a, None, None, None, True, config),
        lambda a: causal_conv1d_ref(*a, activation="silu"),
        2 * 2 * batch * dim * seqlen,
        candidates,
        target,
    )


def convolution_backward(batch: int, dim: int, seqlen: int, candidates: list[Config]) -> Case:
    def make() -> tuple:
        x, dout = (random(batch, seqlen, dim).transpose(1, 2) for _ in range(2))
        return x, random(dim, 4), random(dim), dout

    def run(a: tuple, config: Config | None) -> tuple:
        x, weight, bias, dout = a
        return causal_conv1d_bwd_triton.causal_conv1d_bwd(
            x, weight, bias, None, None, dout, None, True, config
        )[:3]

    def reference(a: tuple) -> tuple:
        x, weight, bias = (v.detach().requires_grad_() for v in a[:3])
        out = causal_conv1d_ref(x, weight, bias, activation="silu")
        return torch.autograd.grad(out, (x, weight, bias), a[3])

    return Case(make, run, reference, 3 * 2 * batch * dim * seqlen, candidates)


def convolution_step(batch: int, dim: int, candidates: list[Config]) -> Case:
    def run(a: tuple, config: Config | None) -> torch.Tensor:
        x, state, weight, bias = a
        return causal_conv1d_update_triton.causal_conv1d_update(
            x[..., None], state, weight, bias, None, None, True, config
        )

    return Case(
        lambda: (random(batch, dim), random(batch, dim, 4), random(dim, 4), random(dim)),
        run,
        lambda a: causal_conv1d_update_ref(a[0], a[1].clone(), a[2], a[3], "silu")[..., None],
        2 * batch * dim * 10,
        candidates,
    )


def gated_norm(rows: int, width: int, candidates: list[Config], backward=False) -> Case:
    def make() -> tuple:
        columns = {start: columns for columns, start in IN_PROJ.values()}.get(width, 2 * width)
        z = random(rows, columns)[:, :width]
        return random(rows, width), random(width), z, random(rows, width)

    def run(a: tuple, config: Config | None) -> Any:
        x, weight, z, dy = a
        if not backward:
            return rmsnorm_triton.rmsnorm_fwd(x, weight, None, z, 1e-5, width, False, config)
        dx, dweight, _, dz = rmsnorm_triton.rmsnorm_bwd(dy, x, weight, None, z, 1e-5, width, False, config)
        return dx, dweight, dz

    def reference(a: tuple) -> Any:
        x, weight, z = (v.detach().requires_grad_(backward) for v in a[:3])
        y = rmsnorm_ref(x, weight, z=z, eps=1e-5, norm_before_gate=False)
        return torch.autograd.grad(y, (x, weight, z), a[3]) if backward else y

    return Case(make, run, reference, (5 if backward else 3) * 2 * rows * width, candidates)


def copy(batch: int, dim: int, seqlen: int) -> Case:
    def make() -> tuple:
        return (random(batch, dim, seqlen),)

    return Case(make, lambda a, _: a[0].clone(), lambda a: a[0], 2 * 2 * batch * dim * seqlen, [])


def add_norm(rows: int, width: int, candidates: list[Config]) -> Case:
    return Case(
        lambda: (random(rows, width), random(rows, width, dtype=torch.float32), random(width), None, 1e-5),
        lambda a, config: rmsnorm_triton.add_norm_fwd(*a, torch.float32, True, config),
        lambda a: add_norm_ref(*a),
        12 * rows * width,
        candidates,
    )


def cases(smoke: bool) -> dict[str, Case]:
    if smoke:
        return {
            "conv": convolution(1, 48, 20, tiles(CHANNEL_LAST, (2, 4, 32, 1), (3, 4, 32, 1))),
            "conv first": convolution(1, 40, 20, tiles("BLOCK_T BLOCK_D num_warps", (16, 8, 1)), first=True),
            "conv backward": convolution_backward(1, 40, 20, tiles(CHANNEL_LAST, (2, 4, 32, 1))),
            "conv step": convolution_step(3, 40, tiles("BLOCK_S BLOCK_D num_warps", (4, 16, 1))),
            "norm": gated_norm(5, 24, tiles("ROWS BLOCK_N num_warps", (2, 32, 1))),
            "norm backward": gated_norm(
                5, 24, tiles("ROWS BLOCK_N PARTS num_warps", (2, 32, 2, 1)), backward=True
            ),
            "add norm": add_norm(5, 24, tiles("ROWS BLOCK_N num_warps", (2, 32, 1))),
        }
    long = tiles(
        CHANNEL_LAST, (4, 32, 256, 4), (4, 44, 256, 4), (4, 84, 256, 4), (4, 112, 256, 4), (4, 16, 256, 4),
        (4, 64, 256, 4), (2, 84, 256, 2), (2, 44, 256, 2), (1, 84, 256, 1), (8, 16, 256, 8), (8, 44, 256, 8),
        (4, 32, 256, 8), (4, 64, 128, 4), (2, 32, 128, 2), (4, 32, 128, 2),
    )  # fmt: skip
    long.append({**long[0], "maxnreg": 96})
    short = tiles(
        CHANNEL_LAST, (4, 4, 256, 4), (4, 8, 256, 4), (4, 16, 256, 4), (2, 8, 256, 2), (4, 8, 128, 4),
        (4, 8, 128, 2), (2, 16, 128, 2),
    )  # fmt: skip
    back = tiles(
        CHANNEL_LAST, (4, 32, 128, 4), (4, 64, 128, 4), (4, 256, 128, 4), (2, 64, 128, 2), (4, 64, 256, 8),
        (4, 64, 256, 4), (2, 64, 256, 4), (8, 64, 128, 8), (4, 64, 64, 2),
    )  # fmt: skip
    step = tiles(
        "BLOCK_S BLOCK_D num_warps", (4, 64, 1), (4, 64, 2), (4, 128, 2), (4, 128, 4), (4, 256, 4),
        (4, 256, 8), (4, 512, 4),
    )  # fmt: skip

    def norm(*rows_and_warps: tuple[int, int], width: int) -> list[Config]:
        return tiles("ROWS BLOCK_N num_warps", *((rows, width, warps) for rows, warps in rows_and_warps))

    return {
        "copy 5376 x 8192": copy(1, 5376, 8192),
        "conv 5376 x 8192": convolution(1, 5376, 8192, long, target="peer 63, must 60, aim 48, limit 41"),
        "conv 5376 x 2048": convolution(
            1, 5376, 2048, tiles(CHANNEL_LAST, *((4, steps, 256, 4) for steps in (8, 12, 16, 24, 32)))
        ),
        "conv 5376 x 512": convolution(1, 5376, 512, short),
        "conv 1792 x 512": convolution(1, 1792, 512, short),
        "conv 1792 x 32768": convolution(1, 1792, 32768, long[:6]),
        "conv first 5376 x 8192": convolution(
            1, 5376, 8192,
            tiles("BLOCK_T BLOCK_D num_warps", (256, 4, 4), (512, 4, 4), (512, 2, 4), (1024, 1, 4),
                  (1024, 4, 8), (128, 16, 4), (2048, 1, 4)),
            first=True,
        ),
        "conv backward 5376 x 8192": convolution_backward(1, 5376, 8192, back),
        "conv step 256 x 5376": convolution_step(256, 5376, step),
        "conv step 1 x 5376": convolution_step(1, 5376, step[:5]),
        "norm 8192 x 5120": gated_norm(8192, 5120, norm((1, 4), (1, 8), (1, 16), width=8192)),
        "norm 8192 x 1536": gated_norm(
            8192, 1536, norm((1, 2), (1, 4), (1, 8), (2, 4), (2, 8), (4, 8), width=2048)
        ),
        "add norm 8192 x 2560": add_norm(8192, 2560, norm((1, 4), (1, 8), (1, 16), (2, 8), width=4096)),
        "add norm 8192 x 768": add_norm(8192, 768, norm((1, 1), (1, 2), (1, 4), (4, 4), (4, 8), width=1024)),
        "norm backward 8192 x 5120": gated_norm(
            8192, 5120,
            tiles("ROWS BLOCK_N PARTS num_warps", (1, 8192, 132, 16), (1, 8192, 264, 16), (1, 8192, 528, 8)),
            backward=True,
        ),
    }  # fmt: skip


def compile_and_compare(job: tuple[bool, str, Config | None]) -> str | None:
    """Run one candidate; returns what is wrong with it, or None."""
    smoke, name, config = job
    torch.manual_seed(0)
    case = cases(smoke)[name]
    try:
        inputs = case.make()
        # The reference first: a step changes its inputs.
        expected, ours = case.reference(inputs), case.run(inputs, config)
        pairs = zip(expected, ours, strict=True) if isinstance(ours, tuple) else [(expected, ours)]
        for want, got in pairs:
            error = (got.float() - want.float()).square().mean().sqrt() / want.float().square().mean().sqrt()
            if not error.item() < TOLERANCE:
                return f"relative RMS error {error.item():.1e}"
    except Exception as error:  # a compiler, out of memory: the sweep goes on
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return None


def microseconds(case: Case, copies: list[tuple], config: Config | None) -> float:
    """The median time of a launch, in a CUDA graph that goes over all the copies of the inputs."""
    case.run(copies[0], config)
    torch.cuda.synchronize()
    graph, kept = torch.cuda.CUDAGraph(), []
    launches = copies * math.ceil(10 / len(copies))
    with torch.cuda.graph(graph):
        for inputs in launches:
            kept.append(case.run(inputs, config))
            del kept[: -len(copies)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(12)]
    for event in events:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    spans = [start.elapsed_time(end) for start, end in pairwise(events[1:])]
    return statistics.median(spans) * 1e3 / len(launches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the full results, as JSON")
    parser.add_argument("--only", default="", help="only the cases whose name holds this")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes and no timing; runs on the CPU")
    parser.add_argument("--workers", type=int, default=min(12, os.cpu_count() or 1))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    chosen = {k: v for k, v in cases(options.smoke).items() if options.only in k}
    jobs = [(options.smoke, name, c) for name, case in chosen.items() for c in [None, *case.candidates]]
    with ProcessPoolExecutor(options.workers, multiprocessing.get_context("spawn")) as pool:
        running = [pool.submit(compile_and_compare, job) for job in jobs]
    results = []
    for (_, name, config), job in zip(jobs, running, strict=True):
        crash = job.exception()  # a process that died takes the ones after it along
        problem = job.result() if crash is None else f"{type(crash).__name__}: {crash}"
        results.append({"case": name, "config": config, "problem": problem})
    for name, case in chosen.items() if not options.smoke else ():
        inputs = case.make()
        copies = [inputs] + [case.make() for _ in range(min(15, L2_BYTES // case.bytes + 1))]
        for result in results:
            if result["case"] == name and result["problem"] is None:
                with contextlib.suppress(torch.OutOfMemoryError):
                    result["us"] = microseconds(case, copies, result["config"])
                    result["GB/s"] = case.bytes / result["us"] / 1e3
        del inputs, copies
        torch.cuda.empty_cache()
        write(options.out, results)
    write(options.out, results)
    report(chosen, results)


def write(folder: Path, results: list[dict[str, Any]]) -> None:
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    about = {"device": machine, "torch": torch.__version__, "results": results}
    (folder / "tune_conv_norm.json").write_text(json.dumps(about, indent=1))


def report(chosen: dict[str, Case], results: list[dict[str, Any]]) -> None:
    """What failed; then a line a case: today's time, the best one and its configuration."""
    for result in results:
        if result["problem"]:
            print("FAILED", result["case"], result["config"] or "default", result["problem"])
    print(f"{'case':26} {'now us':>8} {'best us':>8} {'GB/s':>6}  configuration")
    for name, case in chosen.items():
        timed = sorted((r for r in results if r["case"] == name and "us" in r), key=lambda r: r["us"])
        if not timed:
            print(f"{name:26} {'-':>8}")
            continue
        now = next((f"{r['us']:.1f}" for r in timed if r["config"] is None), "-")
        best = timed[0]
        config = "as now"
        if best["config"] is not None:
            config = " ".join(f"{k}={v}" for k, v in best["config"].items())
        print(f"{name:26} {now:>8} {best['us']:>8.1f} {best['GB/s']:>6.0f}  {config}  {case.target}")


if __name__ == "__main__":
    main()
