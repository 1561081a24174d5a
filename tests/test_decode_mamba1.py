"""The kernels of the Mamba-1 decode step, each against the torch version."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from kernel_testing import assert_close_as_reference
from mamba_kernels.backend import use_backend
from mamba_kernels.decode_mamba1 import mamba1_ssm_step, x_proj_step

EPS = 1e-5
# Triton's interpreter truncates what it stores in bfloat16.
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


@dataclass(frozen=True)
class Shape:
    batch: int = 1
    d_inner: int = 24
    d_state: int = 16
    dt_rank: int = 6

    @property
    def columns(self):
        return self.dt_rank + 2 * self.d_state


SHAPES = [
    Shape(),
    Shape(batch=3, d_inner=21, d_state=5, dt_rank=7),
    Shape(batch=9, d_inner=33, d_state=8, dt_rank=1),
    Shape(batch=2, d_inner=40, d_state=64, dt_rank=48),
]


def randn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def parameters(shape, dtype, device):
    """dt_weight in `dtype`; dt_bias, A and D as models keep them, in float32."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    weight = (randn(shape.d_inner, shape.dt_rank, seed=1) / shape.dt_rank**0.5).to(device, dtype)
    bias, D = (randn(shape.d_inner, seed=seed).float().to(device, wide) for seed in (2, 3))
    A = -randn(shape.d_inner, shape.d_state, seed=4).exp().float().to(device, wide)
    return dict(dt_weight=weight, dt_bias=bias, A=A, D=D)


def advance(
    shape, dtype, state_dtype, sums_dtype, backend, device, pool=None, slots=None, config=None, **options
):
    """One mamba1_ssm_step of random inputs; returns the output and the states."""
    xz = randn(shape.batch, 2 * shape.d_inner, seed=5).half().to(device, dtype)
    dtBC = randn(shape.batch, shape.columns, seed=6).half().to(device, sums_dtype)
    state = randn(pool or shape.batch, shape.d_inner, shape.d_state, seed=7).half().to(device, state_dtype)
    out = torch.empty(shape.batch, shape.d_inner, dtype=dtype, device=device)
    dt = torch.empty_like(out) if options.pop("multiplied", False) else None
    if slots is not None:
        slots = torch.tensor(slots, dtype=torch.int32, device=device)
    with use_backend(backend):
        returned = mamba1_ssm_step(
            xz, dtBC, state, **parameters(shape, dtype, device), out=out, dt=dt,
            state_batch_indices=slots, config=config if backend == "triton" else None, **options,
        )  # fmt: skip
    assert returned.scaled is out and returned.squares is None
    return out, state


def check_triton(shape, dtype, state_dtype, sums_dtype, device, **options):
    wide = torch.float64
    ref64 = advance(shape, wide, wide, wide, "torch", device, **options)
    ref = advance(shape, dtype, state_dtype, sums_dtype, "torch", device, **options)
    ours = advance(shape, dtype, state_dtype, sums_dtype, "triton", device, **options)
    for triple in zip(ours, ref64, ref, strict=True):
        assert_close_as_reference(*triple)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sums", ["kept", "rounded"])
@pytest.mark.parametrize("shape", SHAPES)
def test_x_proj(device, nan_filled_empty, shape, sums, dtype):
    """Of rows that lie apart, as x does beside z; in float32, and in the dtype of the weight."""
    results = []
    for backend, kind in (("torch", torch.float64), ("torch", dtype), ("triton", dtype)):
        xz = randn(shape.batch, 2 * shape.d_inner, seed=1).to(device, kind)
        weight = (randn(shape.columns, shape.d_inner, seed=2) / shape.d_inner**0.5).to(device, kind)
        kept = sums == "kept" and kind != torch.float64
        out = torch.empty(shape.batch, shape.columns, dtype=torch.float32 if kept else kind, device=device)
        with use_backend(backend):
            x_proj_step(xz[:, : shape.d_inner], weight, out)
        results.append(out)
    ref64, ref, ours = results
    assert_close_as_reference(ours, ref64, ref)


SMALL = {"BLOCK_M": 4, "BLOCK_P": 16, "num_warps": 2}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm_eps", [None, EPS])
@pytest.mark.parametrize("config", [pytest.param(None, id="default"), pytest.param(SMALL, id="small")])
@pytest.mark.parametrize("shape", SHAPES)
def test_recurrence_with_dt_proj_and_gate(device, nan_filled_empty, shape, config, norm_eps, dtype):
    sums = torch.float32
    check_triton(shape, dtype, torch.float32, sums, device, norm_eps=norm_eps, config=config)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm_eps", [None, EPS])
@pytest.mark.parametrize("shape", SHAPES)
def test_recurrence_behind_the_librarys_product(device, nan_filled_empty, shape, norm_eps, dtype):
    check_triton(shape, dtype, torch.float32, dtype, device, norm_eps=norm_eps, multiplied=True)


@pytest.mark.parametrize("state_dtype", DTYPES)
@pytest.mark.parametrize("multiplied", [False, True])
@pytest.mark.parametrize("shape", SHAPES[:3])
def test_states_of_16_bits(device, nan_filled_empty, shape, multiplied, state_dtype):
    options = dict(multiplied=multiplied, pool=6 + shape.batch)
    check_triton(shape, torch.float32, state_dtype, torch.float32, device, **options)


@pytest.mark.parametrize("multiplied", [False, True])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_rows_advance_their_slots_and_padding_none(device, nan_filled_empty, backend, multiplied):
    shape, f32 = Shape(batch=3, d_inner=21), torch.float32
    options = dict(pool=5, multiplied=multiplied, norm_eps=EPS)
    out, state = advance(shape, f32, f32, f32, backend, device, slots=[4, -1, 0], **options)
    before = randn(5, shape.d_inner, shape.d_state, seed=7).half().float().to(device)
    assert torch.equal(state[1:4], before[1:4])
    assert (out[1] == 0).all()
    # Row 0 from the state of slot 4, row 2 from that of slot 0, as by the equations.
    for row, slot in ((0, 4), (2, 0)):
        y, h = by_equations(shape, row, before[slot].double(), device)
        torch.testing.assert_close(out[row].double(), y, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(state[slot].double(), h, rtol=1e-4, atol=1e-5)


def by_equations(shape, row, h, device):
    """One channel's recurrence after another, in float64, with norms of dt, B and C."""
    p = {name: tensor.double() for name, tensor in parameters(shape, torch.float32, device).items()}
    x, z = randn(shape.batch, 2 * shape.d_inner, seed=5).half().double()[row].to(device).chunk(2)
    parts = randn(shape.batch, shape.columns, seed=6).half().double()[row].to(device)
    parts = parts.split([shape.dt_rank, shape.d_state, shape.d_state])
    low_rank, B, C = (part / (part.square().mean() + EPS).sqrt() for part in parts)
    h, y = h.clone(), torch.empty_like(x)
    for c in range(shape.d_inner):
        dt = F.softplus(p["dt_weight"][c] @ low_rank + p["dt_bias"][c])
        h[c] = torch.exp(dt * p["A"][c]) * h[c] + dt * x[c] * B
        y[c] = (h[c] @ C + p["D"][c] * x[c]) * F.silu(z[c])
    return y, h


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_16_bit_state_and_weight_keep_every_element_in_its_place(device, dtype):
    """No decay and no input: the state comes back bit for bit. A state of zero: y is dt_proj's product."""
    shape = Shape(batch=2, d_inner=19, d_state=12, dt_rank=10)
    state = randn(2, 19, 12, seed=1).to(device, dtype)
    weight = randn(19, 10, seed=2).to(device, dtype)
    dtBC = randn(2, shape.columns, seed=3).float().to(device)
    dtBC[:, shape.dt_rank :] = 0
    xz = torch.zeros(2, 38, device=device)
    zeros, out, before = torch.zeros(19, device=device), torch.empty(2, 19, device=device), state.clone()
    with use_backend("triton"):
        mamba1_ssm_step(xz, dtBC, state, weight, zeros, zeros[:, None].repeat(1, 12), zeros, out)
    assert torch.equal(state, before)
    # x = 1, B = C = 1 / d_state from a state of zero: y = dt / d_state, gated by silu(1).
    xz.fill_(1)
    dtBC[:, shape.dt_rank :] = 1 / 12
    state.zero_()
    with use_backend("triton"):
        mamba1_ssm_step(xz, dtBC, state, weight, zeros, zeros[:, None].repeat(1, 12), zeros, out)
    dt = F.softplus(dtBC[:, :10].double() @ weight.double().T)
    expected = dt / 12 * torch.sigmoid(torch.ones((), dtype=torch.float64))
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)


def test_an_argument_that_does_not_fit_is_named():
    shape = Shape()
    good = dict(
        xz=torch.zeros(1, 48), dtBC=torch.zeros(1, 38), ssm_state=torch.zeros(1, 24, 16),
        out=torch.zeros(1, 24), **parameters(shape, torch.float32, "cpu"),
    )  # fmt: skip
    mamba1_ssm_step(**good)
    for name, bad, says in (
        ("xz", torch.zeros(1, 47), r"expected shape \(1, 48\), got \(1, 47\)"),
        ("dtBC", torch.zeros(1, 37), r"expected shape \(1, 38\), got \(1, 37\)"),
        ("A", torch.zeros(16, 24).T, "expected a contiguous tensor"),
        ("D", torch.zeros(23), r"expected shape \(24,\)"),
        ("ssm_state", torch.zeros(0, 24, 16), "expected at least 1 slots, got 0"),
        ("dt", torch.zeros(1, 24, dtype=torch.float16), "expected torch.float32, for the library"),
    ):
        with pytest.raises(ValueError, match=rf"^{name}: {says}"):
            mamba1_ssm_step(**good | {name: bad})
    with pytest.raises(ValueError, match=r"^out: expected shape \(1, 5\)"):
        x_proj_step(torch.zeros(1, 24), torch.zeros(5, 24), torch.zeros(1, 6))
