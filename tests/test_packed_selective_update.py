"""The Mamba-1 step on a packed state, beside the recurrence and its kernel beside its reference."""

from dataclasses import replace

import pytest
import torch

from decode_testing import HALF_TYPES
from kernel_testing import assert_close_as_reference
from mamba_kernels.backend import use_backend
from mamba_kernels.packed_selective_update import packed_selective_update
from mamba_kernels.packed_state import (
    STATE_DTYPES,
    LayerFormat,
    advance_positions,
    empty_packed_state,
)
from mamba_kernels.selective_state_update import selective_state_update_ref

CPU = torch.device("cpu")


def randn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def parameters(dim, d_state, gated=True):
    found = dict(A=-randn(dim, d_state, seed=1).exp(), D=randn(dim, seed=2), dt_bias=randn(dim, seed=3) - 1)
    return found if gated else dict(A=found["A"], D=None, dt_bias=None)


def inputs(batch, dim, d_state, token, gated=True):
    row = randn(batch, 3 * dim + 2 * d_state, seed=100 + token)
    x, dt, z, B, C = row.split([dim, dim, dim, d_state, d_state], 1)
    return dict(x=x, dt=dt if gated else dt.abs(), B=B, C=C, z=z if gated else None)


def cast(values, dtype, device):
    return {name: value if value is None else value.to(device, dtype) for name, value in values.items()}


@pytest.mark.parametrize("window", [1, 3, 8])
def test_a_window_changes_nothing_but_when_the_state_is_written(window):
    batch, dim, d_state = 2, 7, 16
    packed = empty_packed_state(
        LayerFormat(("fp32",), window=window), batch, 1, dim, d_state, 1, torch.float64, CPU, dt_per_row=True
    )
    state = torch.zeros(batch, dim, d_state, dtype=torch.float64)
    fixed = parameters(dim, d_state)
    for token in range(40):
        given = inputs(batch, dim, d_state, token)
        expected = selective_state_update_ref(state, **given, **fixed, dt_softplus=True)
        found = packed_selective_update(packed, **given, **fixed, dt_softplus=True)
        advance_positions([packed])
        assert ((found - expected).norm() / expected.norm()).item() < 1e-6
    unpacked = packed.unpack(fixed["A"])[:, 0]
    assert ((unpacked - state).norm() / state.norm()).item() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, *HALF_TYPES])
@pytest.mark.parametrize(
    "state_dtype, rounding, window, dim, d_state, gated, columns",
    [
        *[(state_dtype, "stochastic", 3, 40, 16, True, False) for state_dtype in STATE_DTYPES],
        ("int8", "nearest", 1, 33, 8, False, True),
        ("int4", "stochastic", 2, 64, 20, True, True),
        ("fp8", "nearest", 4, 5, 32, False, False),
    ],
)
def test_the_kernel_reads_and_writes_what_the_reference_does(
    device, nan_filled_empty, state_dtype, rounding, window, dim, d_state, gated, columns, dtype
):
    factor = torch.linspace(0.5, 2, d_state)[None] if columns else None
    packed = empty_packed_state(
        LayerFormat((state_dtype,), rounding, window, seed=5), 3, 1, dim, d_state, 1, dtype, device, factor,
        dt_per_row=True,
    )  # fmt: skip
    packed.position.copy_(torch.tensor([0, 1, 4]))
    fixed = parameters(dim, d_state, gated)
    options = dict(dt_softplus=gated)
    for token in range(2 * window + 1):
        given = cast(inputs(3, dim, d_state, token, gated), dtype, device)
        past = {name: getattr(packed, name).double() for name in ("x", "B", "dt")}
        wide, ours = replace(packed.map(torch.clone), **past), packed.map(torch.clone)
        single = cast(fixed, torch.float32, device)
        with use_backend("triton"):
            found = packed_selective_update(ours, **given, **single, **options)
        with use_backend("torch"):
            double = cast(given, torch.float64, device)
            exact = packed_selective_update(wide, **double, **cast(single, torch.float64, device), **options)
            reference = packed_selective_update(packed, **given, **single, **options)
        assert_close_as_reference(found, exact, reference)
        assert torch.equal(ours.x, packed.x) and torch.equal(ours.B, packed.B)
        torch.testing.assert_close(ours.dt, packed.dt, rtol=1e-5, atol=1e-6)
        slots = torch.arange(3, device=device)
        a, b = ours.stored(slots), packed.stored(slots)
        size = b.abs().amax(-1, keepdim=True) * (4 if columns else 1)
        step = {"fp32": 1e-5, "bf16": 2**-7, "fp16": 2**-9, "int8": 1 / 126, "fp8": 2**-3, "int4": 1 / 6.9}
        assert ((a - b).abs() <= step[state_dtype] * size + 1e-6).all()
        assert state_dtype == "fp32" or ((a - b).abs() > 1e-4 * b.abs() + 1e-6).float().mean() < 0.02
        advance_positions([packed])
