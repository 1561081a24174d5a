from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kernel_testing import assert_close_as_reference
from mamba_kernels import mamba_inner
from mamba_kernels.backend import use_backend
from mamba_kernels.causal_conv1d import causal_conv1d_fn
from mamba_kernels.mamba_inner import mamba_inner_fn, mamba_inner_ref
from mamba_kernels.selective_scan import selective_scan_fn, selective_scan_ref


def make_inputs(
    device="cpu",
    batch=2,
    dim=6,
    d_state=3,
    dt_rank=2,
    d_model=4,
    seqlen=9,
    width=4,
    given="",
    biases=False,
    rms=None,
    is_complex=False,
    dtype=torch.float32,
    **options,
) -> dict[str, Any]:
    """Arguments of mamba_inner_fn by name. given: which of B and C; rms: length of dt's norm weight."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def parameter(*shape):
        return torch.complex(randn(*shape), randn(*shape)) if is_complex else randn(*shape)

    rows = d_state * (2 if is_complex else 1)
    A = parameter(dim, d_state)
    decay = -0.5 - (A.real if is_complex else A).abs()  # away from 0, where gradients pass float16's range
    tensors = {
        "xz": randn(batch, 2 * dim, seqlen),
        "conv1d_weight": randn(dim, 1, width) / 2,
        "conv1d_bias": randn(dim),
        "x_proj_weight": randn(dt_rank + rows * (2 - len(given)), dim) / dim**0.5,
        "delta_proj_weight": randn(dim, dt_rank) / dt_rank**0.5,
        "out_proj_weight": randn(d_model, dim) / dim**0.5,
        "out_proj_bias": randn(d_model) if biases else None,
        "A": torch.complex(decay, A.imag) if is_complex else decay,
        "B": parameter(dim, d_state) if "B" in given else None,
        "C": parameter(dim, d_state) if "C" in given else None,
        "D": randn(dim),
        "delta_bias": randn(dim),
        "B_proj_bias": randn(rows) if biases and "B" not in given else None,
        "C_proj_bias": randn(rows) if biases and "C" not in given else None,
        "b_rms_weight": randn(rows) if rms else None,
        "c_rms_weight": randn(rows) if rms else None,
        "dt_rms_weight": randn({"dt_rank": dt_rank, "dim": dim}[rms]) if rms else None,
        "deltaA": randn(batch, dim, seqlen).abs() if options.get("discretization") else None,
    }
    parts = {True: dtype.to_complex(), False: dtype}
    return {
        k: None if t is None else t.to(parts[t.is_complex()]).to(device) for k, t in tensors.items()
    } | options


def to_float64(inputs):
    wide = {True: torch.complex128, False: torch.float64}
    return {
        k: v.detach().cpu().to(wide[v.is_complex()]) if isinstance(v, torch.Tensor) else v
        for k, v in inputs.items()
    }


def run(function, inputs, **options):
    """The output and the gradients, by name."""
    leaves = {k: v.detach().requires_grad_() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    out = function(**leaves, **options)
    weights = torch.sin(torch.arange(out.numel(), device=out.device, dtype=torch.float64) + 1)
    (out * weights.view(out.shape).to(out.dtype)).sum().backward()
    grads = {f"d{k}": v.grad for k, v in leaves.items() if isinstance(v, torch.Tensor)}
    return {"out": out.detach(), **grads}


def run_in_torch(inputs):
    """What torch makes of the inputs, on their device and in their dtype."""
    with use_backend("torch"):
        return run(mamba_inner_ref, inputs)


CASES = [
    pytest.param({}, id="plain"),
    pytest.param({"width": 2, "biases": True}, id="biases"),
    pytest.param({"given": "B"}, id="B given"),
    pytest.param({"given": "C", "biases": True}, id="C given"),
    pytest.param({"given": "BC"}, id="B and C given"),
    pytest.param({"rms": "dt_rank", "biases": True}, id="norms of dt, B and C"),
    pytest.param({"rms": "dim"}, id="norms of delta, B and C"),
    pytest.param({"b_c_dt_rms": True, "b_c_dt_rms_eps": 1e-2}, id="norms without weights"),
    pytest.param({"is_complex": True, "biases": True}, id="complex"),
    pytest.param({"is_complex": True, "given": "B"}, id="complex, B given"),
    pytest.param({"discretization": "zoh"}, id="deltaA, zoh"),
    pytest.param({"delta_softplus": False}, id="no softplus"),
]


def test_the_reference_is_the_mixer():
    a = make_inputs(dtype=torch.float64, biases=True)
    x, z = a["xz"].chunk(2, 1)
    x = F.silu(F.conv1d(F.pad(x, (3, 0)), a["conv1d_weight"], a["conv1d_bias"], groups=6))
    dt, B, C = F.linear(x.transpose(1, 2), a["x_proj_weight"]).split((2, 3, 3), -1)
    B, C = B + a["B_proj_bias"], C + a["C_proj_bias"]
    delta = F.linear(dt, a["delta_proj_weight"]).transpose(1, 2)
    y = selective_scan_ref(
        x,
        delta,
        a["A"],
        B.transpose(1, 2),
        C.transpose(1, 2),
        a["D"],
        z,
        a["delta_bias"],
        delta_softplus=True,
    )
    expected = F.linear(y.transpose(1, 2), a["out_proj_weight"], a["out_proj_bias"])
    torch.testing.assert_close(mamba_inner_ref(**a), expected)


def test_norms_without_weights_are_norms_with_weights_of_one():
    inputs = make_inputs(dtype=torch.float64, rms="dt_rank")
    ones = {k: torch.ones_like(v) for k, v in inputs.items() if k.endswith("rms_weight")}
    without = dict.fromkeys(ones) | {"b_c_dt_rms": True}
    torch.testing.assert_close(mamba_inner_ref(**inputs | ones), mamba_inner_ref(**inputs | without))


def test_a_dt_norm_of_dim_weights_comes_after_the_projection():
    inputs = make_inputs(dtype=torch.float64)
    inputs["dt_rms_weight"] = torch.rand(6, dtype=torch.float64)
    found = mamba_inner_ref(**inputs)
    scaled = mamba_inner_ref(**inputs | {"delta_proj_weight": 1e3 * inputs["delta_proj_weight"]})
    torch.testing.assert_close(found, scaled, rtol=1e-4, atol=1e-4)  # a norm forgets the scale


@pytest.mark.parametrize("checkpoint_lvl", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients_are_the_references(case, checkpoint_lvl):
    inputs = make_inputs(dtype=torch.float64, **case)
    expected = run_in_torch(inputs)
    found = run(mamba_inner_fn, inputs, checkpoint_lvl=checkpoint_lvl)
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(
            found[name], expected[name], rtol=1e-9, atol=1e-10, msg=lambda m, n=name: n + m
        )


def test_gradients_are_the_derivatives():
    inputs = make_inputs(
        batch=1,
        dim=2,
        d_state=2,
        dt_rank=1,
        d_model=1,
        seqlen=3,
        biases=True,
        rms="dt_rank",
        dtype=torch.float64,
    )
    leaves = {k: v.requires_grad_() for k, v in inputs.items() if v is not None}
    assert torch.autograd.gradcheck(
        lambda *tensors: mamba_inner_fn(**dict(zip(leaves, tensors, strict=True)), checkpoint_lvl=0),
        tuple(leaves.values()),
    )


@pytest.mark.parametrize("case", [CASES[0], CASES[5], CASES[8]])
def test_kernels_are_as_good_as_torch(case, device):
    inputs = make_inputs(device, batch=1, seqlen=6, **case)
    exact = run_in_torch(to_float64(inputs))
    torch_results = run_in_torch(inputs)
    with use_backend("triton"):
        found = run(mamba_inner_fn, inputs)
    for name in found:
        assert_close_as_reference(found[name], exact[name], torch_results[name])


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("is_complex", [False, True])
@pytest.mark.parametrize("variable", [True, False])
def test_the_whole_rounds_as_its_parts_do_one_after_another(variable, is_complex, backend, device):
    """As in mamba_ssm's test: with weights of size 1 the output is large, and any other rounding seen."""
    batch, dim, d_state, dt_rank, seqlen = 2, 24, 4, 5, 19
    A = -torch.rand(dim, d_state, dtype=torch.complex64 if is_complex else torch.float32).to(device) / 2
    states = d_state * (2 if is_complex else 1)
    fixed = [None if variable else torch.randn(dim, d_state, dtype=A.dtype).to(device) for _ in "BC"]
    xz, conv_weight, conv_bias, x_proj, delta_proj, out_proj, D, bias = (
        torch.randn(*shape).to(device)
        for shape in (
            (batch, 2 * dim, seqlen), (dim, 1, 3), (dim,), (dt_rank + 2 * states * variable, dim),
            (dim, dt_rank), (dim // 2, dim), (dim,), (dim,),
        )
    )  # fmt: skip
    with use_backend(backend):
        whole = mamba_inner_fn(
            xz, conv_weight, conv_bias, x_proj, delta_proj, out_proj, None, A, *fixed, D, delta_bias=bias
        )
        x, z = xz.chunk(2, 1)
        x = causal_conv1d_fn(x, conv_weight.squeeze(1), conv_bias, activation="silu")
        tokens = F.linear(x.transpose(1, 2).reshape(-1, dim), x_proj)
        dt, *projected = tokens.split([dt_rank, *([states, states] if variable else [])], dim=1)
        delta = (delta_proj @ dt.t()).view(dim, batch, seqlen).transpose(0, 1)
        if is_complex:
            projected = [t.view(batch, seqlen, -1, 2).permute(0, 2, 1, 3).flatten(2) for t in projected]
        else:
            projected = [t.view(batch, seqlen, -1).transpose(1, 2) for t in projected]
        B, C = (t.contiguous() for t in (projected or fixed))
        y = selective_scan_fn(x, delta, A, B, C, D, z=z, delta_bias=bias, delta_softplus=True)
        reference = mamba_inner_ref(
            xz, conv_weight, conv_bias, x_proj, delta_proj, out_proj, None, A, *fixed, D, delta_bias=bias
        )
    assert torch.equal(whole, F.linear(y.transpose(1, 2), out_proj))
    assert torch.equal(whole, reference)


@pytest.mark.gpu
@pytest.mark.parametrize("checkpoint_lvl", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_kernels_are_as_good_as_torch_in_half_precision(dtype, checkpoint_lvl):
    inputs = make_inputs(
        "cuda", dim=128, d_state=16, dt_rank=8, d_model=64, seqlen=300, dtype=dtype, biases=True
    )
    exact = run_in_torch(to_float64(inputs))
    torch_results = run_in_torch(inputs)
    for name, found in run(mamba_inner_fn, inputs, checkpoint_lvl=checkpoint_lvl).items():
        assert exact[name].abs().max() < torch.finfo(dtype).max, name
        assert_close_as_reference(found, exact[name], torch_results[name])


@pytest.mark.parametrize("checkpoint_lvl, times", [(0, 1), (1, 2)])
def test_level_1_computes_the_convolution_again(checkpoint_lvl, times, monkeypatch):
    calls = []
    conv = mamba_inner.causal_conv1d_fn
    monkeypatch.setattr(mamba_inner, "causal_conv1d_fn", lambda *a, **k: calls.append(0) or conv(*a, **k))
    run(mamba_inner_fn, make_inputs(), checkpoint_lvl=checkpoint_lvl)
    assert len(calls) == times


def test_strides_do_not_matter():
    inputs = make_inputs(dtype=torch.float64)
    channel_last = inputs["xz"].transpose(1, 2).contiguous().transpose(1, 2)
    expected = run(mamba_inner_fn, inputs)
    for name, found in run(mamba_inner_fn, inputs | {"xz": channel_last}).items():
        torch.testing.assert_close(found, expected[name])


def test_without_gradients_the_output_is_the_same():
    inputs = make_inputs(biases=True)
    weight = inputs["x_proj_weight"].requires_grad_()
    out = mamba_inner_fn(**inputs)
    with torch.no_grad():
        assert torch.equal(mamba_inner_fn(**inputs), out)
    out.sum().backward()
    assert weight.grad is not None and inputs["A"].grad is None


@pytest.mark.parametrize("checkpoint_lvl", [0, 1])
def test_autocast_multiplies_in_half_and_gives_gradients_in_the_weights_dtype(checkpoint_lvl):
    inputs = make_inputs(dim=16, dt_rank=4, seqlen=20)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = run(mamba_inner_fn, inputs, checkpoint_lvl=checkpoint_lvl)
    assert found["out"].dtype == torch.bfloat16
    expected = run_in_torch(inputs)
    for name in expected:
        if name != "out":
            assert found[name].dtype == torch.float32
        error = (found[name] - expected[name]).norm() / expected[name].norm()
        assert error < 0.03, name


@pytest.mark.parametrize(
    "name, change",
    [
        ("xz", lambda x: x[:, 1:]),
        ("conv1d_weight", lambda x: x[:, 0]),
        ("conv1d_bias", lambda x: x[1:]),
        ("x_proj_weight", lambda x: x[1:]),
        ("delta_proj_weight", lambda x: x[1:]),
        ("out_proj_weight", lambda x: x[:, 1:]),
        ("out_proj_bias", lambda x: x[1:]),
        ("A", lambda x: x[0]),
        ("B_proj_bias", lambda x: x[1:]),
        ("c_rms_weight", lambda x: x[1:]),
        ("dt_rms_weight", lambda x: x[1:]),
        ("checkpoint_lvl", lambda x: 2),
    ],
)
def test_an_argument_that_does_not_fit_is_named(name, change):
    inputs = make_inputs(biases=True, rms="dt_rank", checkpoint_lvl=1)
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        mamba_inner_fn(**{**inputs, name: change(inputs[name])})


def test_a_bias_for_a_given_B_is_refused():
    inputs = make_inputs(given="B")
    with pytest.raises(ValueError, match="B_proj_bias: expected None, as B is given"):
        mamba_inner_fn(**inputs | {"B_proj_bias": torch.zeros(3)})
