"""What the toolkit runs on: software versions, the names of devices, and the peak of memory in use."""

import contextlib
import ctypes
import importlib.metadata
import platform
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mamba_cli.errors import Mamba2Error

if TYPE_CHECKING:  # versions are asked for where torch may be what is broken
    import torch

REQUIRED = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "huggingface-hub",
    "pyarrow",
    "gguf",
    "typer",
    "rich",
)
OPTIONAL = ("triton", "matplotlib", "sentencepiece")

# What `peak_memory` gives, in words, by the type of the device.
PEAK_MEMORY = {
    "cuda": "peak of PyTorch's CUDA allocator",
    "cpu": "peak resident memory of the process",
}


def versions() -> dict[str, str | None]:
    """Return the versions of Python, this toolkit and the packages it uses; None for what is missing."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("mamba2", *REQUIRED, *OPTIONAL):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def device_name(device: "torch.device") -> str:
    """Return what the maker calls a device."""
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        if name := re.search(r"^model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return name[1].strip()
    return platform.processor() or platform.machine()


def reset_peak_memory(device: "torch.device") -> None:
    """Let `peak_memory` count from now on; on a CPU only Linux can, elsewhere it is the whole process's."""
    if device.type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats(device)
        return
    if sys.platform == "linux":
        # glibc keeps for itself what was freed, of random weights more bytes than the model has.
        with contextlib.suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory(device: "torch.device") -> int | None:
    """Return the most bytes in use since `reset_peak_memory`; None where the system does not say."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    with contextlib.suppress(OSError):
        # getrusage would do, but on Linux its peak is that of the parent process where it was larger.
        if found := re.search(r"^VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE):
            return int(found[1]) * 1024
    with contextlib.suppress(ImportError):
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return None


def free_memory(device: "torch.device") -> int | None:
    """Return the bytes that could be allocated now; None where the system does not say.

    On a GPU what PyTorch's allocator keeps for itself and does not use counts as free.
    """
    if device.type == "cuda":
        import torch

        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    with contextlib.suppress(OSError):
        if found := re.search(r"^MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE):
            return int(found[1]) * 1024
    return None


def check_room(what: str, sequences: int, state_bytes: int, device: "torch.device") -> None:
    """Refuse more sequences than the free memory holds states of; what else they need is not counted."""
    free = free_memory(device)
    if free is not None and sequences * state_bytes > free:
        raise Mamba2Error(
            f"{what}: expected at most {free // state_bytes}, whose states of {state_bytes:,} bytes the free "
            f"memory holds, got {sequences}"
        )
