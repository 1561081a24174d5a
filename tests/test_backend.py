"""Which implementation runs: what is asked for, or one error that says why it cannot."""

import pytest
import torch

from mamba_cli.errors import Mamba2Error
from mamba_cli.load import choose_device, random_model
from mamba_kernels import backend
from mamba_kernels.backend import backend_for, use_backend
from model_testing import BASE

CPU = torch.device("cpu")


@pytest.fixture
def compiled(monkeypatch):
    monkeypatch.setattr(backend, "interpreting", lambda: False)


@pytest.mark.parametrize("name", ["auto", "torch"])
def test_a_cpu_runs_torch_unless_triton_is_asked_for(name):
    with use_backend(name):
        assert backend_for(CPU) == "torch"


def test_triton_on_a_cpu_says_what_it_needs_and_what_runs_without(compiled):
    with pytest.raises(Mamba2Error) as error:
        random_model(BASE, "cpu", backend="triton")
    assert error.value.message == "backend triton: expected a CUDA device (or TRITON_INTERPRET=1), got cpu"
    assert error.value.hint == "--backend torch runs on every device"


def test_a_triton_that_does_not_import_says_why_where_it_is_asked_for_and_warns_elsewhere(monkeypatch):
    monkeypatch.setattr(backend, "triton_problem", lambda: "cannot import triton (ImportError: boom)")
    with use_backend("triton"), pytest.raises(RuntimeError) as error:
        backend_for(CPU)
    assert str(error.value) == (
        "backend triton: expected a Triton that imports, got: cannot import triton (ImportError: boom)"
    )
    backend._warn_once.cache_clear()
    with pytest.warns(UserWarning, match=r"^Triton is not used: cannot import triton \(ImportError: boom\)"):
        assert backend_for(torch.device("cuda")) == "torch"


def test_an_unknown_name_is_told_the_known_ones():
    with pytest.raises(ValueError, match=r"^backend: expected one of auto, torch, triton, got 'cuda'$"):
        use_backend("cuda").__enter__()


def test_a_device_number_that_torch_wraps_is_no_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert torch.device("cuda:200").index < 0
    with pytest.raises(Mamba2Error, match="cuda:200: expected one that torch finds, got 8 CUDA"):
        choose_device("cuda:200")
