"""Choose the block sizes of the decode step on a packed state, and time every format of it.

    PYTHONPATH=.:kernels:commands python benchmarks/tune_packed_state.py --out DIR

The shape is a layer of the 2.7b model: 80 heads x 64 x 128, activations in bf16. Every kernel is compiled
and compared with torch first, in parallel processes that leave it in Triton's cache. A time is that of one
layer, from a CUDA graph over layers whose states are together larger than the L2 cache. GB/s count a state's
codes and scales, read at each token and written once in a window. Beside them stands `ssm_step` on a bf16
state, which is read and written at each token.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from mamba_kernels.backend import use_backend
from mamba_kernels.decode_layer import ssm_step
from mamba_kernels.decode_norm import NormBuffers, Normed, normalise
from mamba_kernels.packed_ssm_step import packed_ssm_step
from mamba_kernels.packed_state import LayerFormat, PackedState, advance_positions, empty_packed_state

Config = dict[str, int] | None
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32
EPS = 1e-5
FORMATS = [
    *[((dtype,), window) for dtype in ("int8", "int4") for window in (1, 8, 16)],
    *[((dtype,), 8) for dtype in ("fp8", "fp16", "bf16", "fp32")],
    (("int8",) * 5 + ("fp16",), 8),
    (("int4",) * 3 + ("int8",), 8),
]
TUNED = [("int8",), ("int4",), ("int8",) * 5 + ("fp16",)]
# Rows of a tile that is read and of one that is folded, warps, registers of a thread (0: no limit): what to
# try on TUNED, window 8, beside what the step itself takes, (64, 16, 1, 128).
TILES = [(64, 16, 1, 0), (64, 16, 1, 96), (64, 8, 1, 128), (64, 32, 1, 128), (32, 16, 1, 128), (64, 16, 2, 0)]


@dataclass(frozen=True)
class Shape:
    nheads: int = 80
    headdim: int = 64
    d_state: int = 128

    @property
    def d_ssm(self) -> int:
        return self.nheads * self.headdim

    @property
    def rows(self) -> int:
        return 2 * self.d_ssm + 2 * self.d_state + self.nheads


class Run:
    """Layers of one format and batch, with random inputs and a state of random numbers."""

    def __init__(self, shape: Shape, dtypes: tuple[str, ...] | None, window: int, batch: int, layers: int):
        """dtypes: the formats of the heads, in turn; None for a plain bf16 state."""
        self.shape, self.batch = shape, batch
        h, p, n = shape.nheads, shape.headdim, shape.d_state

        def random(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.randn(*size, device=DEVICE).to(dtype)

        self.row = random(batch, -(-shape.rows // 64) * 64, dtype=DTYPE)[:, : shape.rows]
        self.dt_bias, self.A_log, self.D = random(h) - 4, random(h), random(h)
        self.norm = random(shape.d_ssm, dtype=DTYPE)
        self.out = NormBuffers.empty(batch, shape.d_ssm, DTYPE, DEVICE)
        state = random(batch, h, p, n)
        self.layers: list[Any] = []
        for layer in range(layers):
            if dtypes is None:
                self.layers.append(state.to(torch.bfloat16 if DEVICE.type == "cuda" else torch.float32))
                continue
            format = LayerFormat(
                tuple(dtypes[head % len(dtypes)] for head in range(h)), window=window, seed=layer
            )
            packed = empty_packed_state(format, batch, h, p, n, 1, DTYPE, DEVICE)
            if layer == 0:
                packed.pack_(state, 1000)
            else:
                for tensor, first in zip(packed.tensors(), self.layers[0].tensors(), strict=True):
                    tensor.copy_(first)
            packed.dt.fill_(0.02)
            packed.x.copy_(random(*packed.x.shape))
            packed.B.copy_(random(*packed.B.shape))
            self.layers.append(packed)

    def step(self, layer: int, config: Config) -> Normed:
        state = self.layers[layer]
        packed = isinstance(state, PackedState)
        return (packed_ssm_step if packed else ssm_step)(
            self.row, state, self.dt_bias, self.A_log, self.D, self.norm, EPS, self.out, ngroups=1, pdl=True,
            config=config,
        )  # fmt: skip

    def token(self, config: Config) -> None:
        for layer in range(len(self.layers)):
            self.step(layer, config)

    def nbytes(self, window: int) -> float:
        """What a token has to read and write of one layer's state."""
        state = self.layers[0]
        if isinstance(state, PackedState):
            return (state.codes.nbytes + state.scales.nbytes) * (1 + 1 / window)
        return 2.0 * state.nbytes


def compare(job: tuple[Shape, tuple[str, ...], int, Config]) -> str | None:
    """Run a few tokens beside torch; return what is wrong, if anything."""
    shape, dtypes, window, config = job
    try:
        torch.manual_seed(0)
        ours = Run(shape, dtypes, window, batch=2, layers=1)
        torch.manual_seed(0)
        reference = Run(shape, dtypes, window, batch=2, layers=1)
        config = config or launched_config(ours, 64)
        for _ in range(3):
            results = []
            for run, backend in ((reference, "torch"), (ours, "triton")):
                with use_backend(backend):
                    results.append(normalise(run.step(0, config if backend == "triton" else None)))
                advance_positions(run.layers)
            error = ((results[0] - results[1]).norm() / results[0].norm()).item()
            if not error < 0.02:
                return f"relative error {error:.2g} against torch"
            A = -ours.A_log.exp()
            states = [run.layers[0].unpack(A) for run in (reference, ours)]
            error = ((states[0] - states[1]).norm() / states[0].norm()).item()
            if not error < 0.02:
                return f"state: relative error {error:.2g} against torch"
    except Exception as error:
        return f"{type(error).__name__}: {error}".strip().replace("\n", " ")[:300]
    return None


def launched_config(run: Run, batch: int) -> dict[str, int]:
    from mamba_kernels.packed_ssm_step_triton import config_for

    return config_for(batch, run.layers[0])


def microseconds(run: Run, config: Config) -> float:
    """The median time of one layer."""

    def work() -> None:
        run.token(config)

    work()
    if DEVICE.type == "cpu":
        begin = time.perf_counter()
        work()
        return 1e6 * (time.perf_counter() - begin) / len(run.layers)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        work()
    return 1e3 * median_of_replays(graph.replay) / len(run.layers)


def median_of_replays(replay: Callable[[], None], times: int = 15) -> float:
    """Milliseconds of one replay."""
    replay()
    found = []
    for _ in range(times):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end))
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, to try the script itself")
    options = parser.parse_args()
    begin = time.perf_counter()
    shape = Shape(4, 16, 32) if options.smoke else Shape()
    batches = (2,) if options.smoke else (64, 256)
    formats = FORMATS[:2] if options.smoke else FORMATS
    tiles = [(16, 8, 1, 128)] if options.smoke else TILES
    configs = [
        {"BLOCK_P": rows, "FOLD_P": fold, "num_warps": warps, "num_stages": 1}
        | ({"maxnreg": registers} if registers else {})
        for rows, fold, warps, registers in tiles
    ]
    jobs: list[Any] = [(shape, dtypes, window, None) for dtypes, window in formats]
    jobs += [(shape, dtypes, 8, config) for dtypes in TUNED for config in configs]
    with multiprocessing.get_context("spawn").Pool(
        min(len(jobs), 12 if DEVICE.type == "cuda" else 2)
    ) as pool:
        problems = pool.map(compare, jobs, chunksize=1)
    found: list[dict[str, Any]] = []
    for job, problem in zip(jobs, problems, strict=True):
        if problem:
            found.append({"format": name(job[1]), "window": job[2], "config": job[3], "problem": problem})
            report(found[-1])
    print(f"compiled and compared {len(jobs)} kernels in {time.perf_counter() - begin:.0f} s", flush=True)
    good = [job for job, problem in zip(jobs, problems, strict=True) if not problem]

    for batch in batches:
        for dtypes, window in [(None, 1), *formats]:
            run = Run(shape, dtypes, window, batch, layers=1 if options.smoke else 4)
            tried = [job[3] for job in good if job[1:3] == (dtypes, window) and batch == batches[0]]
            for config in tried or [None]:
                us = microseconds(run, config)
                found.append(
                    {"format": name(dtypes), "window": window, "batch": batch, "us": us, "config": config,
                     "GB/s": run.nbytes(window) / us / 1e3}
                )  # fmt: skip
                report(found[-1])
            del run
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "tune_packed_state.json").write_text(json.dumps(found, indent=1))
    print(f"{time.perf_counter() - begin:.0f} s")


def report(row: dict[str, Any]) -> None:
    at = f"{row['format']:>12} window {row['window']:>2}"
    tile = "" if row["config"] is None else " ".join(str(value) for value in row["config"].values())
    if "problem" in row:
        print(f"{at} {tile}: {row['problem']}", flush=True)
    else:
        print(f"{at} batch {row['batch']:>3} {row['us']:7.1f} us {row['GB/s']:6.0f} GB/s  {tile}", flush=True)


def name(dtypes: tuple[str, ...] | None) -> str:
    if dtypes is None:
        return "plain bf16"
    return "+".join(dict.fromkeys(dtypes))


if __name__ == "__main__":
    main()
