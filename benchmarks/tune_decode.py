"""Choose the block sizes of the decoding kernels, and time a token of the published shapes.

    PYTHONPATH=.:kernels:commands python benchmarks/tune_decode.py --out DIR

Every candidate is compiled and compared with torch first, in parallel processes that leave it in Triton's
cache. Then each model and batch is one CUDA graph of all its layers with random weights, and one kernel at a
time tries its candidates inside it: that is where its loads overlap the kernel before. Batches of 4 to 16
are run both ways, with our projections and with the library's. Last come the kernels alone, over all the
layers, beside the library's product of the same shape.
"""

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from mamba_kernels import decode_conv_triton, decode_norm_triton
from mamba_kernels.backend import use_backend
from mamba_kernels.decode_layer import embed_step, in_proj_step, lm_head_step, out_proj_step, ssm_step
from mamba_kernels.decode_norm import NormBuffers, Normed, normalise

Config = dict[str, Any]
KERNELS = ("in_proj", "ssm", "out_proj", "lm_head")
EPS = 1e-5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Milliseconds a token to beat and to aim at, bf16 weights and state.
TARGETS = {
    ("130m", 1): (0.27, 0.16),
    ("2.7b", 1): (1.75, 1.48),
    ("130m", 64): (0.60, 0.40),
    ("2.7b", 64): (6.0, 4.6),
}


@dataclass(frozen=True)
class Shape:
    name: str
    d_model: int
    n_layer: int
    vocab: int = 50288
    headdim: int = 64
    d_state: int = 128
    d_conv: int = 4

    @property
    def d_ssm(self) -> int:
        return 2 * self.d_model

    @property
    def nheads(self) -> int:
        return self.d_ssm // self.headdim

    @property
    def conv_dim(self) -> int:
        return self.d_ssm + 2 * self.d_state

    @property
    def rows(self) -> int:
        return self.d_ssm + self.conv_dim + self.nheads


PARTS = ("state_update", "tokens")
STATE_UPDATES = (("mamba2", torch.float32), ("mamba2", torch.bfloat16), ("mamba1", torch.float32))
# Rows of a tile, tiles and warps of a program, cache hints of the state's loads and stores.
STATE_TILES = {
    "mamba2": [
        (4, 2, 1, "", ""), (8, 1, 1, "", ""), (8, 1, 1, "evict_first", ".cs"), (8, 2, 1, "", ""),
        (8, 4, 1, "", ""), (8, 8, 1, "", ""), (16, 1, 1, "", ""), (16, 1, 1, "evict_first", ".cs"),
        (16, 1, 2, "", ""), (16, 2, 2, "", ""), (16, 4, 2, "", ""), (32, 1, 4, "", ""),
        (32, 2, 4, "", ""), (8, 4, 1, "evict_first", ".cs"),
    ],
    "mamba1": [(64, 1, 2, "", ""), (32, 1, 1, "", ""), (64, 1, 1, "", "")],
}  # fmt: skip
SHAPES = [Shape("130m", 768, 24), Shape("2.7b", 2560, 64)]
SMOKE = [Shape("tiny", 32, 2, vocab=40, headdim=16, d_state=16)]


def in_parts_of_4(x: torch.Tensor, weight: torch.Tensor, out: NormBuffers) -> Normed:
    """The `Normed` of rows x, in the parts that the smallest tiles leave: the kernel that reads it is
    compiled for that."""
    out.scaled.copy_(x * weight)
    parts = x.shape[1] // 4
    out.squares[:, :parts] = x.float().square().unflatten(1, (parts, 4)).sum(-1)
    return out.used(parts, 1, EPS)


class Run:
    """A model of random weights and the buffers of one batch size; whole: with the library's products."""

    def __init__(self, shape: Shape, batch: int, whole: bool, layers: int | None = None):
        self.shape, self.batch, self.whole = shape, batch, whole
        self.layers = range(shape.n_layer if layers is None else layers)
        dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32

        def random(*size: int, scale: float, kind: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(*size, dtype=kind, device=DEVICE).normal_(std=scale)

        def each(*size: int, scale: float, kind: torch.dtype = dtype) -> list[torch.Tensor]:
            return [random(*size, scale=scale, kind=kind) for _ in self.layers]

        s = shape
        self.embedding = random(s.vocab, s.d_model, scale=s.d_model**-0.5)
        self.norm = random(s.d_model, scale=1)
        self.gated_norm = random(s.d_ssm, scale=1)
        self.in_proj = each(s.rows, s.d_model, scale=s.d_model**-0.5)
        self.out_proj = each(s.d_model, s.d_ssm, scale=s.d_ssm**-0.5)
        self.conv_weight = each(s.conv_dim, s.d_conv, scale=0.5)
        self.conv_bias = random(s.conv_dim, scale=0.1)
        self.dt_bias, self.A_log, self.D = (random(s.nheads, scale=1, kind=torch.float32) for _ in range(3))
        self.conv_state = [window.transpose(1, 2) for window in each(batch, s.d_conv, s.conv_dim, scale=1)]
        self.ssm_state = each(batch, s.nheads, s.headdim, s.d_state, scale=1)
        self.residual = random(batch, s.d_model, scale=1, kind=torch.float32)
        self.row = random(batch, -(-s.rows // 64) * 64, scale=1)[:, : s.rows]
        self.stream = NormBuffers.empty(batch, s.d_model, dtype, torch.device(DEVICE))
        self.gated = NormBuffers.empty(batch, s.d_ssm, dtype, torch.device(DEVICE))
        self.logits = torch.empty(batch, s.vocab, dtype=dtype, device=DEVICE)
        self.product = torch.empty(batch, s.d_model, dtype=dtype, device=DEVICE)
        self.tokens = torch.zeros(batch, dtype=torch.int64, device=DEVICE)
        self.stream_normed = in_parts_of_4(self.residual, self.norm, self.stream)
        self.gated_normed = in_parts_of_4(random(batch, s.d_ssm, scale=1), self.gated_norm, self.gated)
        if whole:
            self.stream = NormBuffers(self.stream.scaled, None)
            self.stream_normed = Normed(self.stream.scaled, None, EPS)

    def step(self, kernel: str, layer: int, normed: Normed | None, config: Config | None, pdl: bool) -> Any:
        """One kernel on one layer; normed: its input, or None for whatever lies in the buffers."""
        s = self.shape
        if kernel == "in_proj":
            in_proj_step(
                normed or self.stream_normed, self.in_proj[layer], None, self.conv_state[layer],
                self.conv_weight[layer], self.conv_bias, self.row, d_ssm=s.d_ssm, pdl=pdl, config=config,
            )  # fmt: skip
            return self.row
        if kernel == "ssm":
            return ssm_step(
                self.row, self.ssm_state[layer], self.dt_bias, self.A_log, self.D, self.gated_norm, EPS,
                self.gated, ngroups=1, pdl=pdl, config=config,
            )  # fmt: skip
        if kernel == "out_proj":
            return out_proj_step(
                normed or self.gated_normed, self.out_proj[layer], None, self.residual, self.norm, EPS,
                self.stream, product=self.product, pdl=pdl, config=config,
            )  # fmt: skip
        lm_head_step(normed or self.stream_normed, self.embedding, self.logits, pdl=pdl, config=config)
        return self.logits

    def token(self, configs: dict[str, Config | None], pdl: bool = True) -> None:
        """The whole model for one token of each row."""
        normed = embed_step(self.tokens, self.embedding, self.norm, EPS, self.residual, self.stream)
        for layer in self.layers:
            self.step("in_proj", layer, normed, configs["in_proj"], pdl)
            gated = self.step("ssm", layer, None, configs["ssm"], pdl)
            normed = self.step("out_proj", layer, gated, configs["out_proj"], pdl)
        self.step("lm_head", 0, normed, configs["lm_head"], pdl)

    def alone(self, kernel: str, config: Config | None) -> None:
        """One kernel over all layers, so that its weights come from memory."""
        for layer in self.layers if kernel != "lm_head" else range(2):
            self.step(kernel, layer, None, config, True)

    def bytes(self, kernel: str) -> int:
        """What a kernel has to read and write on one layer."""
        size = self.residual.new_empty(0, dtype=self.embedding.dtype).element_size()
        s = self.shape
        numbers = {
            "in_proj": s.rows * s.d_model + self.batch * (s.rows + 2 * s.conv_dim * s.d_conv),
            "ssm": 2 * self.batch * s.d_ssm * s.d_state + self.batch * (s.rows + s.d_ssm),
            "out_proj": s.d_ssm * s.d_model + self.batch * (s.d_ssm + 5 * s.d_model),
            "lm_head": s.vocab * s.d_model + self.batch * 2 * s.vocab,
        }
        return numbers[kernel] * size


def candidates(shape: Shape, batch: int, whole: bool, kernel: str) -> list[Config]:
    """What to try; the fewer the better, as each costs a second of compilation."""
    if kernel == "ssm":
        tiles = [(4, 1), (8, 1), (8, 2), (16, 1), (16, 2), (16, 4), (32, 2), (32, 4)]
        if batch == 1:
            tiles = [(4, 1), (8, 1), (8, 2), (16, 2), (16, 4), (32, 8)]
        return [{"BLOCK_P": rows, "num_warps": warps} for rows, warps in tiles if rows <= shape.headdim]
    if whole:
        return []
    width = shape.d_ssm if kernel == "out_proj" else shape.d_model
    found = []
    warp_counts = {768: (1, 4), 1536: (1, 2), 2560: (1, 2), 5120: (2, 4)}.get(width, (1,))
    row_counts = (2, 4, 8) if batch == 1 else (4, 8)
    if kernel == "out_proj":
        row_counts = (4, 8)
    if kernel == "lm_head":
        row_counts = (4, 8, 16) if batch == 1 else (8,)
    for warps in warp_counts:
        steps = -(-width // (256 * warps))
        for rows in row_counts:
            prefetch = min(steps, max(1, 24 // rows))
            found.append(
                {"BLOCK_M": min(batch, 8), "BLOCK_N": rows, "BLOCK_K": 256 * warps, "PREFETCH": prefetch,
                 "num_warps": warps}
            )  # fmt: skip
    return found


def compile_and_compare(job: tuple[Shape, int, bool, str, Config | None]) -> str | None:
    """Run a candidate on one layer beside torch; return what is wrong with it, if anything."""
    shape, batch, whole, kernel, config = job
    try:
        results = []
        for backend in ("torch", "triton"):
            torch.manual_seed(0)
            run = Run(shape if kernel == "lm_head" else replace(shape, vocab=64), batch, whole, layers=1)
            with use_backend(backend):
                out = run.step(kernel, 0, None, config, pdl=backend == "triton")
            out = normalise(out) if isinstance(out, Normed) else out
            results.append([out, *run.ssm_state, *run.conv_state, run.residual])
        for reference, ours in zip(*results, strict=True):
            error = ((ours.double() - reference.double()).norm() / reference.double().norm()).item()
            if not error < 0.02:
                return f"relative error {error:.2g} against torch"
    except Exception as error:
        return f"{type(error).__name__}: {error}".strip().replace("\n", " ")[:300]
    return None


def milliseconds(work: Callable[[], None], budget: float = 0.04) -> float:
    """The time of `work`, as the best of several replays of a CUDA graph; budget in seconds."""
    work()
    if DEVICE == "cpu":
        begin = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - begin)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        work()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def timed(times: int) -> float:
        start.record()
        for _ in range(times):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / times

    once = timed(2)
    times = max(1, min(50, int(budget * 1e3 / 3 / once)))
    return min(timed(times) for _ in range(3))


def tune(run: Run, broken: dict[str, str]) -> tuple[dict[str, Config | None], list[dict[str, Any]]]:
    """Coordinate descent over the kernels, each candidate timed inside the whole token."""
    best: dict[str, Config | None] = dict.fromkeys(KERNELS)
    now = milliseconds(partial(run.token, best))
    trials = [{"kernel": "default", "ms": now}]
    for kernel in ("in_proj", "out_proj", "ssm", "lm_head"):
        for config in candidates(run.shape, run.batch, run.whole, kernel):
            if key(run.shape, run.batch, run.whole, kernel, config) in broken:
                continue
            tried = {**best, kernel: config}
            ms = milliseconds(partial(run.token, tried))
            trials.append({"kernel": kernel, "config": config, "ms": ms})
            if ms < now:
                now, best = ms, tried
    return best, trials


def key(shape: Shape, batch: int, whole: bool, kernel: str, config: Config | None) -> str:
    return json.dumps([shape.name, batch, whole, kernel, config])


def ways(batch: int) -> list[bool]:
    """Whether to run a batch with the library's products, or both ways, around where these overtake."""
    return [False] if batch < 4 else [False, True] if batch <= 16 else [True]


def cublas_microseconds(run: Run, kernel: str) -> float:
    """torch.mm of one projection's shape over all layers, per layer."""
    weights = {"in_proj": run.in_proj, "out_proj": run.out_proj, "lm_head": [run.embedding] * 2}[kernel]
    x = torch.randn(run.batch, weights[0].shape[1], device=DEVICE).to(weights[0].dtype)
    out = torch.empty(run.batch, weights[0].shape[0], device=DEVICE, dtype=x.dtype)

    def work() -> None:
        for weight in weights:
            torch.mm(x, weight.T, out=out)

    return 1e3 * milliseconds(work) / len(weights)


def time_token(shape: Shape, batch: int, whole: bool, broken: dict[str, str]) -> dict[str, Any]:
    """Tune one model and batch, then time the token and its kernels one by one; prints a summary."""
    torch.manual_seed(0)
    run = Run(shape, batch, whole)
    configs, trials = tune(run, broken)
    ms = milliseconds(partial(run.token, configs), 0.2)
    plain = milliseconds(partial(run.token, configs, pdl=False))
    early = ms
    if whole:  # may the kernels behind a product start early as well?
        start = decode_norm_triton.early_start
        with (
            mock.patch.object(decode_norm_triton, "late_start", start),
            mock.patch.object(decode_conv_triton, "late_start", start),
        ):
            early = milliseconds(partial(run.token, configs), 0.2)
    must, aim = TARGETS.get((shape.name, batch), (None, None))
    print(
        f"{shape.name} batch {batch:2}{' whole' if whole else ''}: {ms:.3f} ms/token, must {must}, aim {aim} "
        f"(default configs {trials[0]['ms']:.3f}, without early starts {plain:.3f}, "
        f"behind products too {early:.3f})"
    )
    alone = {}
    for kernel in KERNELS:
        count = len(run.layers) if kernel != "lm_head" else 2
        us = 1e3 * milliseconds(partial(run.alone, kernel, configs[kernel])) / count
        alone[kernel] = {"us": us, "GB/s": run.bytes(kernel) / us / 1e3}
        beside = ""
        if kernel != "ssm" and batch >= 4:
            alone[kernel]["cublas_us"] = cublas_microseconds(run, kernel)
            beside = f", cuBLAS {alone[kernel]['cublas_us']:.1f}"
        print(
            f"  {kernel:8} {us:6.1f} us {alone[kernel]['GB/s']:5.0f} GB/s{beside}  {short(configs[kernel])}"
        )
    return {
        "shape": asdict(shape), "batch": batch, "whole": whole, "ms": ms, "ms_without_pdl": plain,
        "ms_early_behind_products": early, "configs": configs, "alone": alone, "trials": trials,
    }  # fmt: skip


def state_update_arguments(case: str, dtype: torch.dtype, batch: int, smoke: bool) -> list[Any]:
    """Random arguments of selective_state_update: Mamba-2 of 80 heads x 64 x 128 or Mamba-1 of 5120 x 16."""
    nheads, headdim, d_state = (80, 64, 128) if case == "mamba2" else (1, 5120, 16)
    if smoke:
        nheads, headdim, d_state = 2 if case == "mamba2" else 1, 16, 16
    narrow = torch.bfloat16 if DEVICE == "cuda" else torch.float32

    def random(*size: int, kind: torch.dtype = narrow) -> torch.Tensor:
        return torch.empty(*size, dtype=kind, device=DEVICE).normal_()

    state = random(batch, nheads, headdim, d_state, kind=dtype if DEVICE == "cuda" else torch.float32)
    x, z = random(batch, nheads, headdim), random(batch, nheads, headdim)
    B, C = random(batch, 1, d_state), random(batch, 1, d_state)
    if case == "mamba2":
        dt = random(batch, nheads)[..., None].expand(-1, -1, headdim)
        dt_bias, D = (random(nheads, kind=torch.float32)[:, None].expand(-1, headdim) for _ in range(2))
        A = -random(nheads, kind=torch.float32).exp()[:, None, None].expand(-1, headdim, d_state)
    else:
        dt, dt_bias, D = random(batch, nheads, headdim), random(nheads, headdim), random(nheads, headdim)
        A = -random(nheads, headdim, d_state, kind=torch.float32).exp()
    return [state, x, dt, A, B, C, D, z, dt_bias, True, None]


def state_update_configs(case: str, smoke: bool) -> list[Config | None]:
    tiles = STATE_TILES[case][: 2 if smoke else None]
    return [None] + [
        {"BLOCK_P": rows, "TILES": count, "num_warps": warps, "LOAD": load, "STORE": store}
        for rows, count, warps, load, store in tiles
    ]


def compile_and_compare_update(job: tuple[str, torch.dtype, Config | None, bool]) -> str | None:
    """Run a candidate of selective_state_update beside torch; return what is wrong with it, if anything."""
    from mamba_kernels.selective_state_update import selective_state_update_ref
    from mamba_kernels.selective_state_update_triton import launch

    case, dtype, config, smoke = job
    try:
        torch.manual_seed(0)
        state, *others = state_update_arguments(case, dtype, 2, smoke)
        kept = state.clone()
        out = launch(state, *others, None, "mamba", config)
        expected = selective_state_update_ref(kept, *others)
        for ours, reference in ((out, expected), (state, kept)):
            error = ((ours.double() - reference.double()).norm() / reference.double().norm()).item()
            if not error < 0.01:
                return f"relative error {error:.2g} against torch"
    except Exception as error:
        return f"{type(error).__name__}: {error}".strip().replace("\n", " ")[:300]
    return None


def time_state_update(
    case: str, dtype: torch.dtype, smoke: bool, broken: dict[str, str]
) -> list[dict[str, Any]]:
    """selective_state_update at batch 256, beside a copy and a scaling in place of its state."""
    from mamba_kernels.selective_state_update_triton import launch

    args = state_update_arguments(case, dtype, 2 if smoke else 256, smoke)
    state = args[0]
    print(f"state update {case} {dtype} (batch 256, Mamba-2 fp32/bf16: must 345/195, aim 325/170 us)")
    copied = torch.empty_like(state)
    for name, work in (("copy", partial(copied.copy_, state)), ("in place", partial(state.mul_, 0.999))):
        us = 1e3 * milliseconds(work)
        print(f"  {us:7.1f} us {2 * state.nbytes / us / 1e3:5.0f} GB/s  for comparison: {name}")
    trials = []
    for config in state_update_configs(case, smoke):
        if str((case, dtype, config, smoke)) in broken:
            continue
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
    parser.add_argument("--out", type=Path, required=True, help="folder for tune_decode.json")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, to try the script itself")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--shapes", nargs="+", default=[shape.name for shape in SHAPES])
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) - 2))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    shapes = SMOKE if options.smoke else [shape for shape in SHAPES if shape.name in options.shapes]
    began = time.perf_counter()

    jobs = [
        (shape, batch, whole, kernel, config)
        for shape in reversed(shapes)  # the largest first
        for batch in reversed(options.batches)
        for whole in ways(batch)
        for kernel in reversed(KERNELS)
        for config in (None, *candidates(shape, batch, whole, kernel))
    ]
    if "tokens" not in options.only:
        jobs = []
    updates = [
        (case, dtype, config, options.smoke)
        for case, dtype in (STATE_UPDATES if "state_update" in options.only else ())
        for config in state_update_configs(case, options.smoke)
    ]
    if DEVICE == "cuda":
        with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
            update_problems = pool.map(compile_and_compare_update, updates, chunksize=1)
            problems = pool.map(compile_and_compare, jobs, chunksize=1)
    else:
        update_problems = [compile_and_compare_update(job) for job in updates]
        problems = [compile_and_compare(job) for job in jobs]
    broken = {key(*job): problem for job, problem in zip(jobs, problems, strict=True) if problem is not None}
    broken |= {str(job): problem for job, problem in zip(updates, update_problems, strict=True) if problem}
    for job, problem in broken.items():
        print(f"broken: {job}: {problem}")
    count, seconds = len(jobs) + len(updates), time.perf_counter() - began
    print(f"{count} candidates compiled and compared in {seconds:.0f} s", flush=True)

    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu, interpreter",
        "torch": torch.__version__,
        "broken": broken,
        "tokens": [],
        "state_update": [],
    }
    path = options.out / "tune_decode.json"
    with use_backend("triton"):
        for case, dtype in STATE_UPDATES if "state_update" in options.only else ():
            report["state_update"] += time_state_update(case, dtype, options.smoke, broken)
            path.write_text(json.dumps(report, indent=1))
        for shape in shapes if "tokens" in options.only else ():
            for batch in options.batches:
                for whole in ways(batch):
                    report["tokens"].append(time_token(shape, batch, whole, broken))
                    path.write_text(json.dumps(report, indent=1))
    print(f"{time.perf_counter() - began:.0f} s in all, details in {path}")


def short(config: Config | None) -> str:
    return "default" if config is None else " ".join(f"{k}={v}" for k, v in config.items())


if __name__ == "__main__":
    main()
