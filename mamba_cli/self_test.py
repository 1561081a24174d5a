"""Every operation at a tiny shape, forward and backward, on each backend, against its float64 reference."""

import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from mamba_cli.errors import Mamba2Error
from mamba_cli.self_test_cases import CASES, Case
from mamba_kernels.backend import interpreting, triton_problem, use_backend

# Largest error accepted, relative to the reference in root mean square. Rounding stays far below, and
# a wrong kernel is off by about 1.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2}


@dataclass(frozen=True)
class Outcome:
    """What came of one test on one device and backend, said in the order of the table.

    used: whether operations run on this backend by default on this device. result: "ok", "broken" or
    "not run"; detail: what was found, or why it was not run. traceback: where it failed, if it did.
    """

    test: str
    device: str
    backend: str
    used: bool
    result: str
    detail: str
    seconds: float = 0.0
    traceback: str | None = None


def try_operations(device: torch.device, default_backend: str) -> Iterator[Outcome]:
    """Run every case on `device`, on torch operations and on Triton where Triton can serve the device."""
    unavailable = why_not_triton(device)
    for case in CASES:
        for backend in ("torch", "triton"):
            what = (case.operation, str(device), backend, backend == default_backend)
            if backend == "triton" and unavailable:
                yield Outcome(*what, "not run", unavailable)
            else:
                yield attempt(*what, partial(_compare, case, device, backend))


def attempt(test: str, device: str, backend: str, used: bool, check: Callable[[], str]) -> Outcome:
    """Return the result of check(), which says what it found and raises where that is wrong."""
    start = time.perf_counter()
    try:
        result, detail, trace = "ok", check(), None
    except Mamba2Error as error:
        result, detail, trace = "broken", error.message, None
    except Exception as error:  # a compiler, a driver or a kernel may raise anything
        first_line = next(iter(str(error).splitlines()), "")
        result, detail, trace = "broken", f"{type(error).__name__}: {first_line}", traceback.format_exc()
    return Outcome(test, device, backend, used, result, detail, time.perf_counter() - start, trace)


def why_not_triton(device: torch.device) -> str | None:
    """Return why Triton kernels cannot run on `device`; None where they can."""
    if device.type != "cuda" and not interpreting():
        return "no CUDA device"
    return triton_problem()


def _compare(case: Case, device: torch.device, backend: str) -> str:
    with use_backend(backend):
        results = case.run(device, case.dtype)
    with use_backend("torch"):
        pairs = list(zip(results, case.reference(), strict=True))
    error = max(_relative_error(result, reference) for result, reference in pairs)
    tolerance = TOLERANCE[case.dtype]
    if not error <= tolerance:  # nor is a NaN
        raise Mamba2Error(f"relative error: expected at most {tolerance:.0e}, got {error:.1e}")
    return f"error {error:.1e} (limit {tolerance:.0e})"


def _relative_error(result: torch.Tensor, reference: torch.Tensor) -> float:
    if result.shape != reference.shape:
        raise Mamba2Error(f"result: expected shape {tuple(reference.shape)}, got {tuple(result.shape)}")
    return ((result.detach().double().cpu() - reference).norm() / reference.norm()).item()
