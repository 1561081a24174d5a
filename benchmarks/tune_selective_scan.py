"""Choose the block sizes of the selective scan's kernels, forward and backward, and time them.

    PYTHONPATH=.:kernels:commands python benchmarks/tune_selective_scan.py --out DIR [--only TEXT]

First every configuration is compiled, for tensors with the tokens last and with the channels last, and
compared with torch, in parallel processes that leave it in Triton's cache; one that fails is reported and
left out. Then every case is timed with each: medians of CUDA graph replays, on inputs larger than the L2
cache, or else rotated; the backward time includes torch's sums over the programs. Last comes a line a case
with the configuration in use, and the best.
"""

import argparse
import json
import multiprocessing
import os
import statistics
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from mamba_kernels import selective_scan_bwd_triton, selective_scan_torch, selective_scan_triton
from mamba_kernels.selective_scan import ScanInputs, checked

Config = dict[str, int]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
L2_BYTES = 60 * 2**20
TOLERANCE = 1.5e-2  # relative RMS error in bfloat16; torch's own, with results rounded to it, is 2e-3


def options(*rows: tuple[int, int, int]) -> list[Config]:
    return [dict(zip(("BLOCK_T", "LANES", "num_warps"), row, strict=True)) for row in rows]


FORWARD = options(
    (16, 4, 1), (8, 4, 1), (32, 8, 1), (16, 2, 1), (8, 2, 1), (8, 4, 2), (16, 8, 2)
)  # fmt: skip
BACKWARD = options(
    (8, 4, 1), (8, 4, 2), (8, 4, 4), (16, 8, 1), (16, 8, 2), (16, 8, 4), (16, 16, 2)
)  # fmt: skip


class Case(NamedTuple):
    """A scan of d_state 16 with everything that a Mamba-1 mixer gives it."""

    backward: bool
    dim: int
    seqlen: int
    batch: int = 1
    channels_last: bool = False
    target: str = ""

    @property
    def configs(self) -> list[Config]:
        return BACKWARD if self.backward else FORWARD

    @property
    def bytes(self) -> int:
        """What any implementation has to read and write: u, delta, z, out; or those, dout and 3 gradients."""
        return (7 if self.backward else 4) * 2 * self.batch * self.dim * self.seqlen

    def make(self) -> tuple[ScanInputs, torch.Tensor]:
        """The inputs, views of larger tensors as in the model, and the gradient of the output."""
        d_state = 16

        def tokens(rows: int) -> torch.Tensor:
            shape = (self.batch, self.seqlen, rows) if self.channels_last else (self.batch, rows, self.seqlen)
            tensor = torch.randn(shape, device=DEVICE).bfloat16()
            return tensor.transpose(1, 2) if self.channels_last else tensor

        u, z = tokens(2 * self.dim).chunk(2, 1)
        x_dbl = tokens(160 + 2 * d_state)
        A = -torch.arange(1.0, d_state + 1, device=DEVICE).repeat(self.dim, 1)
        D, delta_bias = torch.ones(self.dim, device=DEVICE), torch.rand(self.dim, device=DEVICE) * 4 - 7
        inputs = checked(
            u, tokens(self.dim), A, x_dbl[:, -2 * d_state : -d_state], x_dbl[:, -d_state:], D, z,
            delta_bias, None, None, True, "mamba",
        )  # fmt: skip
        return inputs, tokens(self.dim)

    def in_use(self, inputs: ScanInputs) -> Config:
        module = selective_scan_bwd_triton if self.backward else selective_scan_triton
        return module.config_for(inputs)


def cases(smoke: bool) -> dict[str, Case]:
    if smoke:
        tiny = dict(dim=16, seqlen=9)
        return {"forward": Case(False, **tiny), "backward": Case(True, **tiny, channels_last=True)}
    found = {}
    for last, layout in ((False, ""), (True, ", channels last")):
        for dim, seqlen, batch, peers in (
            (5120, 8192, 1, ("CUDA C++ 912, must 900, aim 600", "CUDA C++ 3130, must 3100, aim 2000")),
            (1536, 512, 1, ("", "")),
            (1536, 2048, 8, ("", "")),
        ):
            for backward, peer in zip((False, True), peers, strict=True):
                name = f"{'backward' if backward else 'forward'} {batch} x {dim} x {seqlen}{layout}"
                found[name] = Case(backward, dim, seqlen, batch, last, peer)
    return found


def compile_and_compare(job: tuple[Case, Config]) -> str | None:
    """Run one configuration; returns what is wrong with it, or None."""
    case, config = job
    torch.manual_seed(0)
    try:
        inputs, dout = case.make()
        out, _, starts = selective_scan_triton.scan_forward(inputs, True, None if case.backward else config)
        wide = inputs._replace(**{name: tensor.float() for name, tensor in inputs.given().items()})
        want, _, wide_starts = selective_scan_torch.scan_forward(wide, True)
        pairs = {"out": (out, want)}
        if case.backward:
            args = (inputs, starts, dout, None, False)
            grads, _ = selective_scan_bwd_triton.scan_backward(*args, config)
            wants, _ = selective_scan_torch.scan_backward(wide, wide_starts, dout.float(), None, False)
            pairs |= {name: (grads[name], wants[name]) for name in grads}
        for name, (got, want) in pairs.items():
            error = (got.float() - want).square().mean().sqrt() / want.square().mean().sqrt()
            if not error.item() < TOLERANCE:
                return f"{name}: relative RMS error {error.item():.1e}"
    except Exception as error:  # a compiler, out of memory: the sweep goes on
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return None


def microseconds(case: Case, copies: list[tuple], config: Config) -> float:
    """The median time of a scan, in a CUDA graph that goes over all the copies of the inputs."""
    starts = None
    if case.backward:
        _, _, starts = selective_scan_triton.scan_forward(copies[0][0], True)

    def run() -> None:
        for inputs, dout in copies:
            if case.backward:
                selective_scan_bwd_triton.scan_backward(inputs, starts, dout, None, False, config)
            else:
                selective_scan_triton.scan_forward(inputs, False, config)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(12)]
    for event in events:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    spans = [start.elapsed_time(end) for start, end in pairwise(events[1:])]
    return statistics.median(spans) * 1e3 / len(copies)


def time_case(name: str, case: Case, configs: list[Config]) -> list[dict[str, Any]]:
    copies = [case.make() for _ in range(1 + L2_BYTES // case.bytes)]
    in_use = case.in_use(copies[0][0])
    results = []
    for config in configs + ([] if in_use in configs else [in_use]):
        try:
            us = microseconds(case, copies, config)
        except Exception as error:  # as above
            print("FAILED", name, json.dumps(config), str(error).splitlines()[:1])
            continue
        results.append(
            {
                "case": name,
                "config": config,
                "in use": config == in_use,
                "us": us,
                "GB/s": case.bytes / us / 1e3,
            }
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the full results, as JSON")
    parser.add_argument("--only", default="", help="only the cases whose name holds this")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes and no timing; runs on the CPU")
    parser.add_argument("--workers", type=int, default=min(14, os.cpu_count() or 1))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    chosen = {name: case for name, case in cases(arguments.smoke).items() if arguments.only in name}

    # A kernel is compiled anew for a layout, not for a shape: a small one stands for all.
    kinds = {(case.backward, case.channels_last): case for case in chosen.values()}
    if not arguments.smoke:
        kinds = {kind: case._replace(dim=1536, seqlen=512, batch=1) for kind, case in kinds.items()}
    jobs = [
        (kind, config)
        for kind, case in kinds.items()
        for config in case.configs[: 2 if arguments.smoke else None]
    ]
    with ProcessPoolExecutor(arguments.workers, multiprocessing.get_context("spawn")) as pool:
        running = [pool.submit(compile_and_compare, (kinds[kind], config)) for kind, config in jobs]
    problems, sound = [], {kind: [] for kind in kinds}
    for (kind, config), job in zip(jobs, running, strict=True):
        crash = job.exception()  # a process that died takes the ones after it along
        problem = job.result() if crash is None else f"{type(crash).__name__}: {crash}"
        if problem is None:
            sound[kind].append(config)
        else:
            problems.append(f"FAILED {kinds[kind]} {json.dumps(config)} {problem}")

    results: list[dict[str, Any]] = []
    for name, case in chosen.items() if not arguments.smoke else ():
        results += time_case(name, case, sound[case.backward, case.channels_last])
        torch.cuda.empty_cache()
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    about = {"device": machine, "torch": torch.__version__, "problems": problems, "results": results}
    (arguments.out / "tune_selective_scan.json").write_text(json.dumps(about, indent=1))

    print(*problems, sep="\n", end="\n" if problems else "")
    print(f"{'case':42} {'in use us':>9} {'best us':>8} {'GB/s':>6}  configuration")
    for name, case in chosen.items():
        timed = sorted((r for r in results if r["case"] == name), key=lambda r: r["us"])
        if timed:
            used = next((r["us"] for r in timed if r["in use"]), float("nan"))
            figures = f"{used:9.1f} {timed[0]['us']:8.1f} {timed[0]['GB/s']:6.0f}"
            others = "; ".join(f"{'/'.join(map(str, r['config'].values()))} {r['us']:.0f}" for r in timed[:5])
            print(f"{name:42} {figures}  {others}  {case.target}")


if __name__ == "__main__":
    main()
