"""The selective scan against its equation, and against its reference in float64, with each backend."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kernel_testing import assert_close_as_reference
from mamba_kernels.backend import use_backend
from mamba_kernels.discretization import DISCRETIZATIONS
from mamba_kernels.selective_scan import selective_scan_fn, selective_scan_ref

DELTA_BIAS = 0.3


def make_inputs(
    device="cpu",
    batch=1,
    dim=6,
    d_state=5,
    seqlen=20,
    groups=1,
    varying="BC",
    is_complex=False,
    asynchronous=False,
    channel_last=False,
    dtype=torch.float32,
    seed=0,
) -> dict[str, Any]:
    """Tensor arguments of selective_scan_fn by name: parameters float32, what has a time axis `dtype`."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    def parameter(*shape):
        return torch.complex(randn(*shape), randn(*shape)) if is_complex else randn(*shape)

    def tokens(*shape):
        if channel_last:
            return randn(shape[0], shape[2], shape[1]).to(dtype).transpose(1, 2)
        return randn(*shape).to(dtype)

    def projection(name):
        if name not in varying:
            return parameter(dim, d_state)
        return randn(batch, groups, d_state, (2 if is_complex else 1) * seqlen).to(dtype)

    A = parameter(dim, d_state)
    A = torch.complex(-A.real.abs(), A.imag) if is_complex else -A.abs()
    xz = tokens(batch, 2 * dim, seqlen)
    inputs = {
        "u": xz[:, :dim],
        "delta": tokens(batch, dim, seqlen),
        "A": A,
        "B": projection("B"),
        "C": projection("C"),
        "D": randn(dim),
        "z": xz[:, dim:],
        "delta_bias": DELTA_BIAS * randn(dim),
        "deltaA": tokens(batch, dim, seqlen).abs() if asynchronous else None,
        "initial_state": parameter(batch, dim, d_state),
    }
    return {name: None if tensor is None else tensor.to(device) for name, tensor in inputs.items()}


def to_float64(inputs):
    wide = {True: torch.complex128, False: torch.float64}
    return {k: None if v is None else v.detach().cpu().to(wide[v.is_complex()]) for k, v in inputs.items()}


def run(function, inputs, discretization="mamba", backend="torch", backward=True, through_last_state=True):
    """Outputs and gradients by name, with delta_softplus; the loss reads the output and the last state."""
    leaves = {k: None if v is None else v.detach().requires_grad_(backward) for k, v in inputs.items()}
    with use_backend(backend):
        out, last_state = function(
            **leaves, delta_softplus=True, return_last_state=True, discretization=discretization
        )
        results = {"out": out.detach(), "last_state": last_state.detach()}
        if not backward:
            return results
        weights = torch.sin(torch.arange(out.numel(), device=out.device, dtype=torch.float64) + 1)
        loss = (out * weights.view(out.shape).to(out.dtype)).sum()
        if through_last_state:
            loss = loss + last_state.abs().square().sum() / 4
        loss.backward()
    for name, leaf in leaves.items():
        if leaf is not None:  # the reference does not read delta for "dirac" with deltaA
            results[f"d{name}"] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    return results


def recurrence(inputs, discretization):
    """The module's equation, one channel, token and state at a time; no broadcasting to go wrong."""
    a = to_float64(inputs)
    is_complex = a["A"].is_complex()
    batch, dim, seqlen = a["u"].shape
    d_state = a["A"].shape[1]
    out = torch.empty(batch, dim, seqlen, dtype=torch.float64)
    state = a["initial_state"].clone()

    def projected(tensor, b, c, n, t):
        if tensor.dim() == 2:
            return tensor[c, n]
        row = tensor[b, c // (dim // tensor.shape[1]), n]
        return torch.complex(row[2 * t], row[2 * t + 1]) if is_complex else row[t]

    for b, c, t in itertools.product(range(batch), range(dim), range(seqlen)):
        delta = F.softplus(a["delta"][b, c, t] + a["delta_bias"][c])
        decay_delta = delta if a["deltaA"] is None else a["deltaA"][b, c, t]
        y = 0.0
        for n in range(d_state):
            A = a["A"][c, n]
            decay = torch.exp(decay_delta * A)
            gain = delta
            if discretization == "zoh":
                gain = (torch.exp(delta * A) - 1) / A
            elif discretization == "bilinear":
                decay = (1 + decay_delta * A / 2) / (1 - decay_delta * A / 2)
                gain = delta / (1 - delta * A / 2)
            elif discretization == "dirac":
                gain = 1.0
            drive = gain * projected(a["B"], b, c, n, t) * a["u"][b, c, t]
            state[b, c, n] = decay * state[b, c, n] + drive
            y = y + projected(a["C"], b, c, n, t) * state[b, c, n]
        y = 2 * y.real if is_complex else y
        out[b, c, t] = (y + a["D"][c] * a["u"][b, c, t]) * F.silu(a["z"][b, c, t])
    return out, state


KINDS = [
    pytest.param({}, id="real"),
    pytest.param({"varying": ""}, id="constant B and C"),
    pytest.param({"is_complex": True}, id="complex"),
    pytest.param({"is_complex": True, "varying": ""}, id="complex, constant B and C"),
    pytest.param({"asynchronous": True}, id="deltaA"),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("discretization", DISCRETIZATIONS)
def test_the_reference_is_the_equation(discretization, kind):
    inputs = make_inputs(batch=2, dim=4, d_state=2, seqlen=3, groups=2, **kind)
    out, state = recurrence(inputs, discretization)
    found = run(selective_scan_ref, to_float64(inputs), discretization, backward=False)
    torch.testing.assert_close(found["out"], out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found["last_state"], state, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("discretization", DISCRETIZATIONS)
def test_the_references_gradients_are_its_derivatives(discretization, kind):
    inputs = to_float64(make_inputs(dim=2, d_state=2, seqlen=3, **kind))
    leaves = {k: v.requires_grad_() for k, v in inputs.items() if v is not None}

    def scan(*tensors):
        arguments = dict(zip(leaves, tensors, strict=True))
        return selective_scan_ref(
            **arguments, delta_softplus=True, return_last_state=True, discretization=discretization
        )

    assert torch.autograd.gradcheck(scan, tuple(leaves.values()))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("seqlen", [1, 2, 63, 64, 65, 1000])
def test_the_parallel_scan_is_the_recurrence_at_any_length(seqlen, groups):
    inputs = to_float64(make_inputs(batch=2, dim=4, d_state=3, groups=groups, seqlen=seqlen))
    expected = run(selective_scan_ref, inputs)
    for name, found in run(selective_scan_fn, inputs).items():
        torch.testing.assert_close(found, expected[name], rtol=1e-9, atol=1e-11, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("discretization", DISCRETIZATIONS)
def test_the_parallel_scan_is_the_recurrence_for_every_rule_and_kind(discretization, kind):
    inputs = to_float64(make_inputs(batch=2, dim=4, d_state=3, groups=2, seqlen=45, **kind))
    expected = run(selective_scan_ref, inputs, discretization)
    for name, found in run(selective_scan_fn, inputs, discretization).items():
        torch.testing.assert_close(found, expected[name], rtol=1e-9, atol=1e-11, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_torch_gradients_of_half_precision_tensors(dtype):
    inputs = make_inputs(seqlen=50, dtype=dtype)
    exact = run(selective_scan_ref, to_float64(inputs))
    expected = run(selective_scan_ref, inputs)
    for name, found in run(selective_scan_fn, inputs).items():
        assert found.dtype == expected[name].dtype
        assert_close_as_reference(found, exact[name], expected[name])


def test_zoh_at_A_zero_is_finite_and_has_the_right_gradient(backend, device, short_stretches):
    inputs = make_inputs(device, seqlen=6)
    inputs["A"][:, 0] = 0.0
    inputs["A"][:, 1] = -1e-7
    inputs["A"][:, 2] = -1e-3
    results = run(selective_scan_fn, inputs, "zoh", backend)
    exact = run(selective_scan_ref, to_float64(inputs), "zoh")
    for name, found in results.items():
        assert_close_as_reference(found, exact[name], found, factor=0.0)
    # Where A is 0, zoh is the rule of "mamba"; its derivative there is not.
    inputs["A"].zero_()
    for name, found in run(selective_scan_fn, inputs, "zoh", backend, backward=False).items():
        expected = run(selective_scan_fn, inputs, "mamba", backend, backward=False)[name]
        torch.testing.assert_close(found, expected)


def test_zoh_reference_is_differentiable_at_A_zero():
    inputs = to_float64(make_inputs(dim=2, d_state=2, seqlen=3))
    A = torch.zeros(2, 2, dtype=torch.float64, requires_grad=True)

    def scan(A):
        return selective_scan_ref(**{**inputs, "A": A}, delta_softplus=True, discretization="zoh")

    assert torch.autograd.gradcheck(scan, (A,))


def test_scan_continues_from_a_state(backend, device, short_stretches):
    inputs = make_inputs(device, batch=2, seqlen=12, groups=2)
    whole = run(selective_scan_fn, inputs, backend=backend, backward=False)
    state, outs = inputs["initial_state"], []
    for first, last in ((0, 5), (5, 6), (6, 12)):
        part = {k: v[..., first:last] if k in ("u", "delta", "B", "C", "z") else v for k, v in inputs.items()}
        results = run(selective_scan_fn, {**part, "initial_state": state}, backend=backend, backward=False)
        outs.append(results["out"])
        state = results["last_state"]
    torch.testing.assert_close(torch.cat(outs, -1), whole["out"])
    torch.testing.assert_close(state, whole["last_state"])


def test_results_are_the_same_in_every_run(backend, device, short_stretches):
    inputs = make_inputs(device, batch=2, dim=9, d_state=16, seqlen=10)
    first, second = (run(selective_scan_fn, inputs, backend=backend) for _ in range(2))
    for name in first:
        assert torch.equal(first[name], second[name]), name


def test_one_group_of_C_serves_all_groups_of_B(backend, device, short_stretches):
    inputs = make_inputs(device, dim=4, seqlen=5, groups=2)
    one = inputs["C"][:, :1].clone()
    found = run(selective_scan_fn, {**inputs, "C": one}, backend=backend)
    expected = run(selective_scan_fn, {**inputs, "C": one.repeat(1, 2, 1, 1)}, backend=backend)
    torch.testing.assert_close(found["out"], expected["out"])
    torch.testing.assert_close(found["dC"], expected["dC"].sum(1, keepdim=True))


def test_large_steps_neither_overflow_nor_lose_the_state(backend, device, short_stretches):
    inputs = make_inputs(device, seqlen=20)
    inputs["A"] = inputs["A"] - 16
    inputs["delta"] = inputs["delta"] + 20 * (torch.arange(20, device=device) % 3 == 0)
    exact = run(selective_scan_ref, to_float64(inputs))
    for name, found in run(selective_scan_fn, inputs, backend=backend).items():
        assert_close_as_reference(found, exact[name], run(selective_scan_ref, inputs)[name])


def test_only_what_requires_a_gradient_gets_one(backend, device, short_stretches):
    inputs = make_inputs(device, seqlen=3)
    A = inputs["A"].requires_grad_()
    with use_backend(backend):
        out = selective_scan_fn(**inputs)
        out.sum().backward()  # the gradient of a sum is expanded: strides of 0
        assert A.grad is not None and inputs["u"].grad is None
        with torch.no_grad():
            assert not selective_scan_fn(**inputs).requires_grad


def test_autocast_leaves_the_arithmetic_in_float32():
    inputs = make_inputs(seqlen=40)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = selective_scan_fn(**inputs)
    assert torch.equal(found, selective_scan_fn(**inputs))


def test_fewest_arguments(backend, device):
    given = {k: v for k, v in make_inputs(device, seqlen=5).items() if k in ("u", "delta", "A", "B", "C")}
    given["delta"] = given["delta"].abs()
    with use_backend(backend):
        found = selective_scan_fn(**given)
        three_axes = selective_scan_fn(**{**given, "B": given["B"][:, 0], "C": given["C"][:, 0]})
    torch.testing.assert_close(found, selective_scan_ref(**given))
    assert torch.equal(found, three_axes)


@pytest.mark.parametrize(
    "name, change",
    [
        ("u", lambda x: x[0]),
        ("u", lambda x: x[..., :0]),
        ("delta", lambda x: x[..., 1:]),
        ("z", lambda x: x.to(torch.complex64)),
        ("A", lambda x: x[:-1]),
        ("B", lambda x: x[:, :, :-1]),
        ("B", lambda x: x.repeat(1, 4, 1, 1)),
        ("C", lambda x: x[..., 1:]),
        ("D", lambda x: x[1:]),
        ("delta_bias", lambda x: x[None]),
        ("initial_state", lambda x: x[..., 1:]),
        ("deltaA", lambda x: True),
    ],
)
def test_an_argument_that_does_not_fit_is_named(name, change):
    inputs = make_inputs(seqlen=4)
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        selective_scan_fn(**{**inputs, name: change(inputs[name])})


def test_an_unknown_discretization_is_refused():
    with pytest.raises(ValueError, match="discretization: expected mamba or zoh or"):
        selective_scan_fn(**make_inputs(seqlen=4), discretization="x")


def test_complex_B_needs_complex_A():
    inputs = make_inputs(seqlen=4, varying="C")
    with pytest.raises(ValueError, match="B: expected real"):
        selective_scan_fn(**{**inputs, "B": inputs["B"].to(torch.complex64)})
