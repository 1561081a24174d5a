"""Choose the block sizes of the SSD kernels, forward and backward, and time them.

    PYTHONPATH=.:kernels:commands python benchmarks/tune_chunk_scan.py --out DIR [--only TEXT]

First every kernel variant is compiled and compared with torch, in parallel processes that leave it in
Triton's cache; one that fails is reported and left out. Then each case is tuned one part at a time: the
states walk, the kernel of the blocks, its heads a program, the segments a row; each part's best is kept
for the next. Times are medians of CUDA graph replays; the inputs are larger than the L2 cache, or else
rotated. Last comes a line a case and block size.
"""

import argparse
import copy
import json
import multiprocessing
import os
import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from mamba_kernels import chunk_scan_bwd_triton, chunk_scan_fwd_triton
from mamba_kernels.chunk_scan import mamba_chunk_scan_combined_ref

Config = dict[str, Any]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
L2_BYTES = 60 * 2**20
TOLERANCE = 1.5e-2  # relative RMS error in bfloat16; the reference's own is about 5e-3
NO_LIMIT = (0.0, float("inf"))


def options(names: str, *rows: tuple[int, ...]) -> list[Config]:
    return [dict(zip(names.split(), row, strict=True)) for row in rows]


# For each BLOCK, the variants that are compiled apart; the first of each list is where tuning starts.
STATES = {
    128: options("BLOCK_P num_warps num_stages", (64, 4, 3), (32, 4, 3), (32, 4, 4)),
    64: options("BLOCK_P num_warps num_stages", (64, 8, 4), (64, 4, 4), (64, 8, 3), (32, 4, 4), (64, 4, 3)),
    32: options("BLOCK_P num_warps num_stages", (64, 4, 4)),
    16: options("BLOCK_P num_warps num_stages", (16, 4, 1)),
}
VARIANTS = {
    "output": {
        128: options("BLOCK_P num_warps num_stages", (64, 8, 4), (64, 8, 3), (64, 8, 5)),
        64: options("BLOCK_P num_warps num_stages", (64, 4, 3), (64, 4, 2)),
        16: options("BLOCK_P num_warps num_stages", (16, 4, 1)),
    },
    "gradients": {
        64: options("BLOCK_P num_warps num_stages", (64, 8, 3), (64, 8, 2), (64, 4, 1), (64, 4, 2)),
        16: options("BLOCK_P num_warps num_stages", (16, 4, 1)),
    },
}
SUMS = {
    64: options(
        "BLOCK_N BLOCK_P num_warps num_stages",
        (64, 64, 4, 3),
        (64, 64, 4, 4),
        (128, 64, 4, 3),
        (128, 64, 8, 3),
    ),
    16: options("BLOCK_N BLOCK_P num_warps num_stages", (16, 16, 4, 1)),
}


@dataclass
class Case:
    """The scan at one shape. `heads` and `segments` are tried after the compiled variants of `part`."""

    seqlen: int
    nheads: int
    part: str
    blocks: list[int]
    heads: list[int]
    segments: list[int]
    headdim: int = 64
    d_state: int = 128
    target: str = ""

    @property
    def backward(self) -> bool:
        return self.part == "gradients"

    def start(self, block: int) -> Config:
        config = {
            "BLOCK": block,
            "states": dict(STATES[block][0]),
            self.part: dict(VARIANTS[self.part][block][0]),
        }
        config["states"]["segments"] = self.segments[0]
        config[self.part]["heads"] = self.heads[0]
        if self.backward:
            config["sums"] = dict(SUMS[block][0])
        return config

    def steps(self, block: int) -> list[tuple[str, list[Config]]]:
        """What is tuned, in order: a part of the configuration, and the changes to try on it."""
        return [
            ("states", STATES[block]),
            (self.part, VARIANTS[self.part][block]),
            ("sums", SUMS[block] if self.backward else []),
            (self.part, [{"heads": n} for n in self.heads]),
            ("states", [{"segments": n} for n in self.segments]),
        ]

    @property
    def bytes(self) -> int:
        """What any implementation has to read and write: x and y, or x, dy and dx."""
        return (3 if self.backward else 2) * 2 * self.seqlen * self.nheads * self.headdim

    def make(self) -> tuple[torch.Tensor, ...]:
        """dy, then x, dt, A, B, C, D, z, dt_bias and initial states; x, B, C views as in the model."""
        conv = torch.randn(1, self.seqlen, self.nheads * self.headdim + 2 * self.d_state, device=DEVICE)
        x, B, C = conv.bfloat16().split((self.nheads * self.headdim, self.d_state, self.d_state), -1)
        x = x.unflatten(-1, (self.nheads, self.headdim))
        dt = torch.randn(1, self.seqlen, self.nheads, device=DEVICE).bfloat16()
        A = -torch.rand(self.nheads, device=DEVICE) * 15 - 1
        dt_bias = torch.rand(self.nheads, device=DEVICE) * 4 - 7
        D = torch.ones(self.nheads, device=DEVICE)
        return torch.randn_like(x), x, dt, A, B[:, :, None], C[:, :, None], D, None, dt_bias, None

    def run(self, inputs: tuple, config: Config | None) -> tuple[torch.Tensor | None, ...]:
        dy, *scan = inputs
        rest = (None, None, True, NO_LIMIT, config)
        if self.backward:
            return chunk_scan_bwd_triton.launch_backward(dy, None, *scan, *rest)
        return chunk_scan_fwd_triton.launch_forward(*scan, *rest)

    def reference(self, inputs: tuple) -> tuple[torch.Tensor | None, ...]:
        dy, *scan = inputs
        leaves = [t.float().requires_grad_(self.backward) if t is not None else None for t in scan]
        x, dt, A, B, C, D, z, dt_bias, initial_states = leaves
        y, last = mamba_chunk_scan_combined_ref(
            x, dt, A, B, C, 64, D=D, z=z, dt_bias=dt_bias, initial_states=initial_states,
            dt_softplus=True, return_final_states=True,
        )  # fmt: skip
        if not self.backward:
            return y, last
        y.backward(dy.float())
        return tuple(leaf.grad if leaf is not None else None for leaf in leaves)


def cases(smoke: bool) -> dict[str, Case]:
    if smoke:
        tiny = dict(seqlen=40, nheads=4, blocks=[16], heads=[2, 4], segments=[1, 2], headdim=16, d_state=16)
        return {part: Case(part=part, **tiny) for part in VARIANTS}
    target = "peer 650, must 400, aim 220"
    return {
        "forward 80 heads, 8192": Case(8192, 80, "output", [128, 64], [40, 20], [1], target=target),
        "forward 24 heads, 32768": Case(32768, 24, "output", [128, 64], [24], [11, 5, 22]),
        "forward 24 heads, 8192": Case(8192, 24, "output", [128, 64], [12, 24], [11, 5, 3]),
        "forward 24 heads, 2048": Case(2048, 24, "output", [64], [3, 6], [11, 5, 1]),
        "forward 80 heads, 2048": Case(2048, 80, "output", [128], [10], [1]),
        "forward 80 heads, 512": Case(512, 80, "output", [64], [3], [1]),
        "forward 24 heads, 512": Case(512, 24, "output", [64], [1], [1]),
        "backward 80 heads, 8192": Case(
            8192, 80, "gradients", [64], [40, 20], [1], target="peer 2630, must 1800, aim 1000"
        ),
    }


def compiled_variants(case: Case) -> Iterator[Config]:
    """One configuration for each kernel variant of the case, and one with segments."""
    for block in case.blocks:
        for part, changes in case.steps(block)[:3]:
            for change in changes:
                yield changed(case.start(block), part, change)
        yield changed(case.start(block), "states", {"segments": 2})


def changed(config: Config, part: str, change: Config) -> Config:
    config = copy.deepcopy(config)
    config[part].update(change)
    return config


def compile_and_compare(job: tuple[bool, str, Config]) -> str | None:
    """Run one variant; returns what is wrong with it, or None."""
    smoke, name, config = job
    torch.manual_seed(0)
    case = cases(smoke)[name]
    try:
        inputs = case.make()
        for want, got in zip(case.reference(inputs), case.run(inputs, config), strict=True):
            if want is None:
                continue
            error = (got.float() - want).square().mean().sqrt() / want.square().mean().sqrt()
            if not error.item() < TOLERANCE:
                return f"relative RMS error {error.item():.1e}"
    except Exception as error:  # a compiler, out of memory: the sweep goes on
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return None


def microseconds(case: Case, copies: list[tuple], config: Config | None) -> float:
    """The median time of a scan, in a CUDA graph that goes over all the copies of the inputs."""
    case.run(copies[0], config)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for inputs in copies:
            case.run(inputs, config)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(12)]
    for event in events:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    spans = [start.elapsed_time(end) for start, end in pairwise(events[1:])]
    return statistics.median(spans) * 1e3 / len(copies)


def tune(name: str, case: Case, failed: list[Config]) -> list[dict[str, Any]]:
    """Time the case for each BLOCK, one part after the other; every measurement, as they were made."""
    copies = [case.make() for _ in range(1 + L2_BYTES // case.bytes)]
    us = microseconds(case, copies, None)
    results: list[dict[str, Any]] = [{"case": name, "config": None, "us": us, "GB/s": case.bytes / us / 1e3}]
    for block in case.blocks:
        best, best_us = case.start(block), float("inf")
        for part, changes in case.steps(block):
            for config in [changed(best, part, change) for change in changes]:
                variant = [
                    config.get(p, {}) | {"heads": 0, "segments": 0} for p in ("states", case.part, "sums")
                ]
                if any(bad["BLOCK"] == block and bad["variant"] in variant for bad in failed):
                    continue
                try:
                    us = microseconds(case, copies, config)
                except Exception as error:  # as above
                    print("FAILED", name, json.dumps(config), str(error).splitlines()[:1])
                    continue
                results.append({"case": name, "config": config, "us": us, "GB/s": case.bytes / us / 1e3})
                if us < best_us:
                    best, best_us = config, us
    return results


def write(folder: Path, results: list[dict[str, Any]], problems: list[str]) -> None:
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    about = {"device": machine, "torch": torch.__version__, "problems": problems, "results": results}
    (folder / "tune_chunk_scan.json").write_text(json.dumps(about, indent=1))


def report(chosen: dict[str, Case], results: list[dict[str, Any]], problems: list[str]) -> None:
    """What failed; then for each case and block size the launchers' own choice and the best."""
    print(*problems, sep="\n", end="\n" if problems else "")
    print(f"{'case':26} {'ours us':>8} {'best us':>8} {'GB/s':>6}  configuration")
    for name, case in chosen.items():
        ours = next((r["us"] for r in results if r["case"] == name), 0.0)
        for block in case.blocks:
            swept = [r for r in results if r["case"] == name and r["config"]]
            timed = [r for r in swept if r["config"]["BLOCK"] == block]
            if timed:
                best = min(timed, key=lambda r: r["us"])
                figures = f"{ours:8.1f} {best['us']:8.1f} {best['GB/s']:6.0f}"
                print(f"{name:26} {figures}  {json.dumps(best['config'])}  {case.target}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the full results, as JSON")
    parser.add_argument("--only", default="", help="only the cases whose name holds this")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes and no timing; runs on the CPU")
    parser.add_argument("--workers", type=int, default=min(12, os.cpu_count() or 1))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)

    chosen = {k: v for k, v in cases(arguments.smoke).items() if arguments.only in k}
    # Variants are the same for all cases of a kernel; the first of each stands for them.
    first = {case.part: name for name, case in reversed(chosen.items())}
    jobs = [
        (arguments.smoke, name, config)
        for name in first.values()
        for config in compiled_variants(chosen[name])
    ]
    with ProcessPoolExecutor(arguments.workers, multiprocessing.get_context("spawn")) as pool:
        running = [pool.submit(compile_and_compare, job) for job in jobs]
    problems, failed = [], []
    for (_, name, config), job in zip(jobs, running, strict=True):
        crash = job.exception()  # a process that died takes the ones after it along
        problem = job.result() if crash is None else f"{type(crash).__name__}: {crash}"
        if problem:
            problems.append(f"FAILED {name} {json.dumps(config)} {problem}")
            start = chosen[name].start(config["BLOCK"])
            for part in ("states", chosen[name].part, "sums"):
                if part in config and config[part] != start[part]:
                    variant = config[part] | {"heads": 0, "segments": 0}
                    failed.append({"BLOCK": config["BLOCK"], "variant": variant})
    results: list[dict[str, Any]] = []
    for name, case in chosen.items() if not arguments.smoke else ():
        results += tune(name, case, failed)
        torch.cuda.empty_cache()
        write(arguments.out, results, problems)
    write(arguments.out, results, problems)
    report(chosen, results, problems)


if __name__ == "__main__":
    main()
