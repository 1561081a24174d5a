"""Choose the block sizes of the decoding kernels, and time a token of the published shapes.

    PYTHONPATH=.:kernels:commands python benchmarks/tune_decode.py --out DIR

Every candidate is compiled and compared with torch first, in parallel processes that leave it in Triton's
cache. Then each model and batch is one CUDA graph of all its layers with random weights, and one kernel at a
time tries its candidates inside it: that is where its loads overlap the kernel before. A batch is run each
way that could serve it: our products on the ordinary cores ("vector") or the tensor cores ("tensor"), or the
library's ("library", where in_proj also tries ours, with the convolution at its end). Last come the kernels
alone, over all the layers, so that weights come from memory: in_proj with the convolution, out_proj with the
residual.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tuning import DEVICE, WORKERS, Config, about, milliseconds, problems, relative_error, short

from mamba_kernels import decode_conv_triton, decode_norm_triton
from mamba_kernels.backend import use_backend
from mamba_kernels.decode_layer import (
    embed_step,
    in_proj_step,
    lm_head_step,
    normalise_step,
    out_proj_step,
    ssm_step,
)
from mamba_kernels.decode_matmul_triton import blocks_in_flight
from mamba_kernels.decode_norm import NormBuffers, Normed, normalise

KERNELS = ("in_proj", "ssm", "out_proj", "lm_head")
EPS = 1e-5
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


SHAPES = [Shape("130m", 768, 24), Shape("2.7b", 2560, 64)]
SMOKE = [Shape("tiny", 32, 2, vocab=40, headdim=16, d_state=16)]


def in_parts(x: torch.Tensor, weight: torch.Tensor, out: NormBuffers, columns: int) -> Normed:
    """The `Normed` of rows x, its squares summed over every `columns` columns."""
    out.scaled.copy_(x * weight)
    parts = x.shape[1] // columns
    out.squares[:, :parts] = x.float().square().unflatten(1, (parts, columns)).sum(-1)
    return out.used(parts, 1, EPS)


class Run:
    """A model of random weights and the buffers of one batch size, run one way."""

    def __init__(self, shape: Shape, batch: int, way: str, layers: int | None = None):
        self.shape, self.batch, self.way = shape, batch, way
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
        # Rows in as many parts as the kernels ahead leave, for which those that read them are compiled.
        columns = {"vector": (4, 4), "tensor": (32, 16), "library": (32, 16)}[way]
        x = random(batch, s.d_ssm, scale=1)
        self.stream_normed = in_parts(self.residual, self.norm, self.stream, columns[0])
        self.gated_normed = in_parts(x, self.gated_norm, self.gated, columns[1])
        if way == "library":
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
        if self.way == "tensor":  # then the head is the library's
            normed = normalise_step(normed, self.product, pdl=pdl)
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


def ways(batch: int) -> list[str]:
    if batch < 4:
        return ["vector"]
    return ["vector", "library"] if batch < 9 else ["tensor", "library"]


def candidates(shape: Shape, batch: int, way: str, kernel: str) -> list[Config]:
    """What to try; the fewer the better, as each costs a second of compilation."""
    if kernel == "ssm":
        tiles = [(8, 1), (16, 1), (16, 4), (32, 2), (32, 4)]
        if way == "library":  # tried the other way already
            tiles = []
        elif batch == 1:
            tiles = [(2, 1), (4, 1), (8, 1), (8, 2), (16, 2), (16, 4)]
        return [{"BLOCK_P": rows, "num_warps": warps} for rows, warps in tiles if rows <= shape.headdim]
    width = shape.d_ssm if kernel == "out_proj" else shape.d_model
    if way == "vector":
        return vector_candidates(batch, kernel, width)
    if kernel == "lm_head" or (way == "library" and kernel == "out_proj"):
        return []
    tiles = [(16, 1, 32, 8), (16, 2, 32, 8), (16, 4, 32, 8), (16, 2, 32, 4), (16, 1, 64, 8), (32, 1, 32, 8)]
    if way == "tensor":
        tiles += [(16, 1, 16, 8), (16, 1, 32, 4), (32, 1, 32, 4)]
    return [
        {"BLOCK_M": m, "TILES_M": repeats, "BLOCK_N": n, "SLICES": warps, "num_warps": warps}
        | blocks_in_flight(m, n, warps, width, torch.bfloat16)
        for m, repeats, n, warps in tiles if m * repeats <= max(16, batch)
    ]  # fmt: skip


def vector_candidates(batch: int, kernel: str, width: int) -> list[Config]:
    warp_counts = {768: (1, 4), 1536: (1, 2), 2560: (1, 2), 5120: (2, 4)}.get(width, (1,))
    row_counts = (2, 4, 8) if batch == 1 else (4, 8)
    if kernel == "out_proj":
        row_counts = (4, 8)
    if kernel == "lm_head":
        row_counts = (4, 8, 16) if batch == 1 else (8,)
    return [
        {"BLOCK_M": min(batch, 8), "BLOCK_N": rows, "BLOCK_K": 256 * warps, "num_warps": warps,
         "PREFETCH": min(-(-width // (256 * warps)), max(1, 24 // rows))}
        for warps in warp_counts for rows in row_counts
    ]  # fmt: skip


# A candidate, and the first batch that it is tried at.
Job = tuple[Shape, int, str, str, Config | None]


def key(shape: Shape, way: str, kernel: str, config: Config | None) -> str:
    return json.dumps([shape.name, way, kernel, config])


def compare(job: Job) -> str | None:
    """Run a candidate on one layer beside torch; return what is wrong with it, if anything."""
    shape, batch, way, kernel, config = job
    results = []
    for backend in ("torch", "triton"):
        torch.manual_seed(0)
        run = Run(shape if kernel == "lm_head" else replace(shape, vocab=64), batch, way, layers=1)
        with use_backend(backend):
            out = run.step(kernel, 0, None, config, pdl=backend == "triton")
        out = normalise(out) if isinstance(out, Normed) else out
        results.append([out, *run.ssm_state, *run.conv_state, run.residual])
    errors = [relative_error(ours, reference) for reference, ours in zip(*results, strict=True)]
    return None if all(error < 0.02 for error in errors) else f"relative errors {errors} against torch"


def tune(run: Run, broken: set[str]) -> tuple[dict[str, Config | None], list[dict[str, Any]]]:
    """Coordinate descent over the kernels, each candidate timed inside the whole token."""
    best: dict[str, Config | None] = dict.fromkeys(KERNELS)
    now = milliseconds(partial(run.token, best))
    trials: list[dict[str, Any]] = [{"kernel": "default", "ms": now}]
    for kernel in ("in_proj", "out_proj", "ssm", "lm_head"):
        for config in candidates(run.shape, run.batch, run.way, kernel):
            if key(run.shape, run.way, kernel, config) in broken:
                continue
            tried = {**best, kernel: config}
            ms = milliseconds(partial(run.token, tried))
            trials.append({"kernel": kernel, "config": config, "ms": ms})
            if ms < now:
                now, best = ms, tried
    return best, trials


def time_token(shape: Shape, batch: int, way: str, broken: set[str]) -> dict[str, Any]:
    """Tune one model and batch, then time the token and its kernels one by one; prints a summary."""
    torch.manual_seed(0)
    run = Run(shape, batch, way)
    configs, trials = tune(run, broken)
    ms = milliseconds(partial(run.token, configs), 0.2)
    plain = milliseconds(partial(run.token, configs, pdl=False))
    early = None
    if way == "library":  # may the kernels behind a product start early as well?
        start = decode_norm_triton.early_start
        with (
            mock.patch.object(decode_norm_triton, "late_start", start),
            mock.patch.object(decode_conv_triton, "late_start", start),
        ):
            early = milliseconds(partial(run.token, configs), 0.2)
    alone = {}
    for kernel in KERNELS:
        count = len(run.layers) if kernel != "lm_head" else 2
        us = 1e3 * milliseconds(partial(run.alone, kernel, configs[kernel])) / count
        alone[kernel] = {"us": us, "GB/s": run.bytes(kernel) / us / 1e3}
    must, aim = TARGETS.get((shape.name, batch), (None, None))
    print(
        f"{shape.name} batch {batch} {way}: {ms:.3f} ms/token, must {must}, aim {aim}; "
        f"{1e3 * (ms - alone['lm_head']['us'] / 1e3) / len(run.layers):.1f} us a layer "
        f"(default configs {trials[0]['ms']:.3f}, without early starts {plain:.3f}"
        + (f", early behind products too {early:.3f})" if early else ")")
    )
    for kernel, its in alone.items():
        rate = f"{its['us']:6.1f} us {its['GB/s']:5.0f} GB/s"
        print(f"  {kernel:8} {rate}  {short(configs[kernel])}", flush=True)
    return {
        "shape": asdict(shape), "batch": batch, "way": way, "ms": ms, "ms_without_pdl": plain,
        "ms_early_behind_products": early, "configs": configs, "alone": alone, "trials": trials,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for tune_decode.json")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, to try the script itself")
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 64, 128])
    parser.add_argument("--shapes", nargs="+", default=[shape.name for shape in SHAPES])
    parser.add_argument("--workers", type=int, default=WORKERS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    shapes = SMOKE if options.smoke else [shape for shape in SHAPES if shape.name in options.shapes]
    began = time.perf_counter()

    jobs: dict[str, Job] = {}
    for shape in reversed(shapes):  # the largest first
        for batch in options.batches:
            for way in ways(batch):
                for kernel in reversed(KERNELS):
                    for config in (None, *candidates(shape, batch, way, kernel)):
                        # What is chosen by default depends on the batch, a candidate does not.
                        name = key(shape, way, kernel, config) + (f" {batch}" if config is None else "")
                        jobs.setdefault(name, (shape, batch, way, kernel, config))
    found = dict(zip(jobs, problems(compare, list(jobs.values()), options.workers), strict=True))
    broken = {name: problem for name, problem in found.items() if problem is not None}
    for name, problem in broken.items():
        print(f"broken: {name}: {problem}")
    print(f"{len(jobs)} candidates compared in {time.perf_counter() - began:.0f} s", flush=True)

    report: dict[str, Any] = about() | {"broken": broken, "tokens": []}
    path = options.out / "tune_decode.json"
    with use_backend("triton"):
        for shape in shapes:
            for batch in options.batches:
                for way in ways(batch):
                    report["tokens"].append(time_token(shape, batch, way, set(broken)))
                    path.write_text(json.dumps(report, indent=1))
    print(f"{time.perf_counter() - began:.0f} s in all, details in {path}")


if __name__ == "__main__":
    main()
