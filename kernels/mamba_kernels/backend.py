"""Which implementation an operation runs. The one home of that choice.

An operation has two implementations: plain torch (any device) and Triton (a CUDA device, or the CPU
through Triton's interpreter when TRITON_INTERPRET=1 was set before Triton was imported). Public
functions keep the ecosystem's signatures, so the choice is not an argument but a context:

    with use_backend("torch"):
        y = causal_conv1d_fn(x, weight, bias)
"""

import contextlib
import functools
import importlib
import os
import warnings
from collections.abc import Iterator
from contextvars import ContextVar

import torch

BACKENDS = ("auto", "torch", "triton")

_chosen: ContextVar[str] = ContextVar("mamba_kernels_backend", default="auto")


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run the operations inside the block on `name`: "auto", "torch" or "triton".

    "auto" takes Triton for CUDA tensors, and torch for all others or where Triton is missing or
    broken (one warning says so). "triton" raises where Triton cannot serve the tensor's device.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, got {name!r}")
    token = _chosen.set(name)
    try:
        yield
    finally:
        _chosen.reset(token)


def backend_for(device: torch.device) -> str:
    """Return "torch" or "triton": what an operation on tensors of `device` runs in this context."""
    name = _chosen.get()
    if name == "torch" or (name == "auto" and device.type != "cuda"):
        return "torch"
    problem = triton_problem()
    if problem is None and device.type != "cuda" and not interpreting():
        raise RuntimeError(
            f"backend triton: expected a CUDA device (or TRITON_INTERPRET=1), got {device.type}"
        )
    if problem is None:
        return "triton"
    if name == "triton":
        raise RuntimeError(f"backend triton: expected a Triton that imports, got: {problem}")
    _warn_once(problem)
    return "torch"


def interpreting() -> bool:
    """Whether Triton kernels run in Triton's interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@functools.cache
def triton_problem() -> str | None:
    """Why Triton cannot be used in this process, or None where it imports."""
    try:
        importlib.import_module("triton.language")
    except Exception as error:  # a broken install raises anything at all
        return f"cannot import triton ({type(error).__name__}: {error})"
    return None


@functools.cache
def _warn_once(problem: str) -> None:
    warnings.warn(f"Triton is not used: {problem}; running torch operations instead", stacklevel=4)
