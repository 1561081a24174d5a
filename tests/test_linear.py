"""A linear layer gives y = x W^T + b whatever layout it keeps its weight in, and keeps it once."""

import weakref

import pytest
import torch
import torch.nn.functional as F

from mamba_cli.linear import Linear


def make(dtype: torch.dtype, rows: int = 40, columns: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=generator) / columns**0.5
    return weight.to(dtype), torch.randn(rows, generator=generator).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)]
)
@pytest.mark.parametrize("shape", [(1,), (2,), (3,), (4,), (9,), (1, 1), (2, 3)], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_product(dtype, tolerance, shape, with_bias):
    weight, bias = make(dtype)
    x = torch.randn(*shape, 24, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = F.linear(x.double(), weight.double(), bias.double() if with_bias else None)
    with torch.inference_mode():
        y = Linear(weight, bias if with_bias else None)(x)
    assert y.shape == expected.shape and y.dtype == dtype
    assert (y.double() - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_weight_is_given_back_as_it_came(dtype):
    weight, _ = make(dtype)
    assert torch.equal(Linear(weight).weight, weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_second_copy_is_kept(dtype):
    weight, _ = make(dtype)
    linear = Linear(weight)
    if not linear.packed:
        pytest.skip("this processor multiplies from the plain layout")
    plain = weakref.ref(weight)
    del weight
    assert plain() is None
