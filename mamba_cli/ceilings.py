"""What a machine can do at most, measured: bytes moved by a large copy, operations of a large matmul."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

# Far beyond the caches, so that the memory is what is measured.
COPY_BYTES = {"cuda": 2**30, "cpu": 2**28}
# Rows and columns of the matrices: large enough to fill the device, done in milliseconds.
MATMUL_SIZE = {"cuda": 8192, "cpu": 2048}
# On a CPU without instructions for float16 a matmul in it takes a thousand times as long as in float32. Other
# products in it do not, so that a model would reach several times such a ceiling: float32 is the better one.
CPU_FLOAT16_SIZE = 512
# Runs between two looks at the clock: on a GPU one is short beside the way to it and back.
RUNS = {"cuda": 10, "cpu": 1}
LOOKS = 5


@dataclass(frozen=True)
class Ceilings:
    """The rates reached on one device, the best of several runs.

    bytes_per_second: of a copy, read and written bytes together. operations_per_second: of a square
    matmul, a multiplication and an addition counting as two. method: how they were measured, in words.
    """

    bytes_per_second: float
    operations_per_second: float
    method: str


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Measure `device`, with a matmul in `dtype`, or for float16 on a CPU in float32 where that is faster.

    Takes about a second and gives its memory back.
    """
    nbytes, size = COPY_BYTES[device.type], MATMUL_SIZE[device.type]
    sizes = {dtype: size}
    if device.type == "cpu" and dtype == torch.float16:
        sizes = {torch.float16: min(size, CPU_FLOAT16_SIZE), torch.float32: size}
    if device.type == "cuda":
        nbytes = min(nbytes, torch.cuda.mem_get_info(device)[0] // 4)  # beside a model that is loaded
    rates = {kind: 2 * size**3 / _matmul_seconds(size, device, kind) for kind, size in sizes.items()}
    fastest = max(rates, key=rates.__getitem__)
    return Ceilings(
        2 * nbytes / _copy_seconds(nbytes, device),
        rates[fastest],
        f"measured: a copy of {nbytes / 2**20:.0f} MiB, a matmul of {sizes[fastest]} x {sizes[fastest]} in "
        f"{str(fastest).removeprefix('torch.')}",
    )


def _copy_seconds(nbytes: int, device: torch.device) -> float:
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return _seconds(lambda: target.copy_(source), device)


def _matmul_seconds(size: int, device: torch.device, dtype: torch.dtype) -> float:
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return _seconds(lambda: torch.matmul(a, b, out=out), device)


def synchronize(device: torch.device) -> None:
    """Wait until `device` has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.inference_mode()
def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of one run, the least of LOOKS after a warm-up."""
    runs = RUNS[device.type]
    seconds = []
    for _ in range(1 + LOOKS):
        start = time.perf_counter()
        for _ in range(runs):
            run()
        synchronize(device)
        seconds.append((time.perf_counter() - start) / runs)
    return min(seconds[1:])
