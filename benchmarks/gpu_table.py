"""Every row of the speed table on one GPU: ours, the figure of mamba_ssm, the bound and the targets.

    PYTHONPATH=.:kernels:commands python benchmarks/gpu_table.py --out results --rows decode prefill

Random weights in the published shapes, bf16. mamba_ssm 2.3.2's figures, the bounds and the targets are
those measured on an H200 (torch 2.11, Triton 3.6) when the targets were set; they are quoted, not rerun.
Writes DIR/gpu_table.json.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import triton

from mamba_cli.decoding import CapturedDecoder
from mamba_cli.language_model import LanguageModel
from mamba_cli.sampling import SamplingParams, UniformNumbers
from mamba_cli.shapes import published_config
from mamba_cli.step_graph import capture
from mamba_cli.weights import Weights, random_tensors
from mamba_kernels.backend import use_backend
from mamba_kernels.causal_conv1d import causal_conv1d_fn
from mamba_kernels.chunk_scan import mamba_chunk_scan_combined
from mamba_kernels.selective_scan import selective_scan_fn
from mamba_kernels.selective_state_update import selective_state_update


class Row(NamedTuple):
    """One line: `measure()` gives the figure in `unit`; the others are mamba_ssm's, the bound, targets."""

    group: str
    work: str
    unit: str
    measure: Callable[[], float]
    mamba_ssm: float | None
    bound: float
    must: float
    aim: float


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--rows", nargs="*", default=[], help="groups: decode prefill op")
    parser.add_argument("--seconds", type=float, default=500, help="start no further row after this")
    options = parser.parse_args()
    started, results = time.perf_counter(), []
    for row in rows():
        if options.rows and row.group not in options.rows:
            continue
        if time.perf_counter() - started > options.seconds:
            break
        try:
            ours = row.measure()
        except Exception as error:  # one broken row must not cost the others
            print(f"{row.work}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        results.append({"ours": ours} | {name: v for name, v in row._asdict().items() if name != "measure"})
        print(
            f"{row.work:48} {ours:9.4g} {row.unit:6} mamba_ssm {row.mamba_ssm or '-':<6} "
            f"bound {row.bound:<6} must {row.must:<6} aim {row.aim:<6} {verdict(row, ours)}",
            flush=True,
        )
    results.sort(key=lambda row: ["decode", "prefill", "op"].index(row["group"]))
    options.out.mkdir(parents=True, exist_ok=True)
    machine = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }
    (options.out / "gpu_table.json").write_text(json.dumps({"machine": machine, "rows": results}, indent=1))


def rows() -> list[Row]:
    ms, us, speed = "ms", "us", "ktok/s"
    fp32, bf16 = torch.float32, torch.bfloat16
    return [
        Row("decode", "decode 130m, batch 1", ms, lambda: decode("130m", 1), 0.644, 0.06, 0.27, 0.16),
        Row(
            "decode", "decode 130m, batch 64, bf16 state", ms, lambda: decode("130m", 64, "bf16"),
            1.33, 0.25, 0.60, 0.40,
        ),
        Row("prefill", "prefill 130m, 32768", speed, lambda: prefill("130m", 32768), 915, 2600, 1200, 1800),
        Row("decode", "decode 2.7b, batch 1", ms, lambda: decode("2.7b", 1), 3.18, 1.34, 1.75, 1.48),
        Row(
            "decode", "decode 2.7b, batch 64, bf16 state", ms, lambda: decode("2.7b", 64, "bf16"),
            9.68, 3.8, 6.0, 4.6,
        ),
        Row(
            "decode", "decode 2.7b, batch 64, int8 state", ms, lambda: decode("2.7b", 64, "int8"),
            None, 2.6, 4.5, 3.4,
        ),
        Row("prefill", "prefill 2.7b, 512 tokens", speed, lambda: prefill("2.7b", 512), 3.8, 126, 25, 60),
        Row("prefill", "prefill 2.7b, 2048 tokens", speed, lambda: prefill("2.7b", 2048), 22.4, 126, 60, 90),
        Row("prefill", "prefill 2.7b, 8192 tokens", speed, lambda: prefill("2.7b", 8192), 72, 126, 85, 105),
        Row("prefill", "prefill 2.7b, 32768", speed, lambda: prefill("2.7b", 32768), 72, 126, 85, 105),
        Row("op", "SSD forward, 80 heads, 8192 tokens", ms, lambda: ssd(False), 0.650, 0.08, 0.40, 0.22),
        Row("op", "SSD backward, same", ms, lambda: ssd(True), 2.63, 0.2, 1.8, 1.0),
        Row("op", "state update, batch 256, fp32", us, lambda: state_update(fp32), 376, 315, 345, 325),
        Row("op", "state update, batch 256, bf16", us, lambda: state_update(bf16), 371, 158, 195, 170),
        Row("op", "causal conv1d, 5376 channels, 8192", us, conv1d, 63, 41, 60, 48),
        Row("op", "selective scan forward", ms, lambda: selective_scan(False), 0.912, 0.16, 0.9, 0.6),
        Row("op", "selective scan backward, same", ms, lambda: selective_scan(True), 3.13, 0.4, 3.1, 2.0),
    ]  # fmt: skip


def verdict(row: Row, ours: float) -> str:
    def reached(target: float) -> bool:
        return ours >= target if row.unit == "ktok/s" else ours <= target

    return "AIM" if reached(row.aim) else "must" if reached(row.must) else "MISSED"


def seconds(run: Callable[[], object], repeats: int = 20) -> float:
    """Median device seconds of `run`, replayed from a CUDA graph so that launches do not count."""
    graph = capture(run, torch.device("cuda"))
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return sorted(times)[repeats // 2]


_models: dict[str, LanguageModel] = {}


def model(shape: str) -> LanguageModel:
    if shape not in _models:
        _models.clear()  # one at a time on the device
        config = published_config(shape)
        tensors = random_tensors(config, device="cuda")
        weights = Weights(tensors.__getitem__, set(tensors), torch.device("cuda"), torch.bfloat16)
        _models[shape] = LanguageModel(config, weights, name=shape)
    return _models[shape]


@torch.inference_mode()
def decode(shape: str, batch: int, state_dtype: str = "fp32") -> float:
    """Wall-clock milliseconds a step of the loop that `generate` runs, greedy, read back on the host."""
    lm = model(shape).with_state(state_dtype)
    ids = torch.randint(lm.config.vocab_size, (batch, 16))
    logits, state = lm.prefill(ids)
    greedy = SamplingParams(temperature=0)
    decoder = CapturedDecoder(lm, state, greedy, lm.config.vocab_size)
    tokens = decoder.tokens(logits, state, [1], UniformNumbers(0, batch))
    for _ in range(32):
        next(tokens)
    start = time.perf_counter()
    for _ in range(256):
        next(tokens)
    return (time.perf_counter() - start) / 256 * 1e3


@torch.inference_mode()
def prefill(shape: str, length: int) -> float:
    """Thousands of tokens a second, wall clock, logits of the last position on the device."""
    lm = model(shape)
    ids = torch.randint(lm.config.vocab_size, (1, length))
    for _ in range(3):
        lm.prefill(ids)
    torch.cuda.synchronize()
    repeats = 10 if length <= 2048 else 4
    start = time.perf_counter()
    for _ in range(repeats):
        lm.prefill(ids)
    torch.cuda.synchronize()
    return repeats * length / (time.perf_counter() - start) / 1e3


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype).requires_grad_(grad)


def ssd(backward: bool) -> float:
    x, dt = (
        random(1, 8192, 80, 64, grad=backward),
        (random(1, 8192, 80) - 4).detach().requires_grad_(backward),
    )
    B, C = random(1, 8192, 1, 128, grad=backward), random(1, 8192, 1, 128, grad=backward)
    A = -torch.rand(80, device="cuda") * 15 - 1
    D, bias = random(80, dtype=torch.float32), random(80, dtype=torch.float32)
    A, D, bias = (t.detach().requires_grad_(backward) for t in (A, D, bias))

    def forward() -> torch.Tensor:
        return mamba_chunk_scan_combined(x, dt, A, B, C, 256, D=D, dt_bias=bias, dt_softplus=True)

    return backward_ms(forward, (x, dt, A, B, C, D, bias)) if backward else seconds(forward) * 1e3


def backward_ms(forward: Callable[[], torch.Tensor], inputs: tuple[torch.Tensor, ...]) -> float:
    """Median milliseconds of the gradients; the queue is kept full, so launches do not count."""
    out = forward()
    grad = torch.randn_like(out)
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(50_000_000)  # about 25 ms for the host to run ahead in
        begin.record()
        for _ in range(5):
            torch.autograd.grad(out, inputs, grad, retain_graph=True)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 5)
    return sorted(times[1:])[2]


def state_update(dtype: torch.dtype) -> float:
    state = random(256, 80, 64, 128, dtype=dtype)
    x, z = random(256, 80, 64), random(256, 80, 64)
    dt = random(256, 80)[..., None].expand(256, 80, 64)
    # One number a head, as Mamba-2 has it: negated behind `expand` it would be a whole matrix.
    A = (-torch.rand(80, device="cuda"))[:, None, None].expand(80, 64, 128)
    D, bias = (torch.rand(80, device="cuda")[:, None].expand(80, 64) for _ in range(2))
    B, C = random(256, 1, 128), random(256, 1, 128)
    with use_backend("triton"):
        return 1e6 * seconds(
            lambda: selective_state_update(state, x, dt, A, B, C, D, z=z, dt_bias=bias, dt_softplus=True)
        )


def conv1d() -> float:
    x = random(1, 8192, 5376).transpose(1, 2)
    weight, bias = random(5376, 4), random(5376)
    return 1e6 * seconds(lambda: causal_conv1d_fn(x, weight, bias, activation="silu"))


def selective_scan(backward: bool) -> float:
    u, delta, z = (random(1, 5120, 8192, grad=backward) for _ in range(3))
    A = (-torch.rand(5120, 16, device="cuda") * 15 - 1).requires_grad_(backward)
    B, C = random(1, 16, 8192, grad=backward), random(1, 16, 8192, grad=backward)
    D, bias = (random(5120, dtype=torch.float32, grad=backward) for _ in range(2))

    def forward() -> torch.Tensor:
        return selective_scan_fn(u, delta, A, B, C, D, z=z, delta_bias=bias, delta_softplus=True)

    inputs = (u, delta, A, B, C, D, z, bias)
    return backward_ms(forward, inputs) if backward else seconds(forward) * 1e3


if __name__ == "__main__":
    main()
