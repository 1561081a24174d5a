"""Shared fixtures. Triton reads TRITON_INTERPRET when it is imported, so it is set before that."""

import os
from collections.abc import Iterator
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import pytest

from checkpoint_testing import save_state_spaces
from mamba_kernels.backend import use_backend
from model_testing import BASE


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="runs on the GPU")),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where kernels run: the GPU where there is one, else the CPU through Triton's interpreter."""
    return torch.device(request.param)


@pytest.fixture(params=["torch", "triton"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test with each backend, and name it."""
    with use_backend(request.param):
        yield request.param


@pytest.fixture
def nan_filled_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what torch.empty and its kin return with NaN, so that an element nobody writes is seen."""

    def poisoned(make):
        def wrapper(*args, **kwargs):
            tensor = make(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() or tensor.is_complex() else tensor

        return wrapper

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))


@pytest.fixture
def short_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the selective scan save a state every 8 tokens, in tiles of 4: short sequences have several."""
    from mamba_kernels import selective_scan_bwd_triton, selective_scan_triton

    monkeypatch.setattr(selective_scan_triton, "START_EVERY", 8)
    for module in (selective_scan_triton, selective_scan_bwd_triton):
        config_for = module.config_for
        monkeypatch.setattr(module, "config_for", lambda inputs, f=config_for: {**f(inputs), "BLOCK_T": 4})


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A small checkpoint to convert, as mamba_ssm writes it."""
    return save_state_spaces(tmp_path / "source", BASE)
