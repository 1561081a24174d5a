import itertools

import pytest
import torch
import torch.nn.functional as F

from kernel_testing import assert_close_as_reference
from mamba_kernels.backend import use_backend
from mamba_kernels.discretization import DISCRETIZATIONS
from mamba_kernels.selective_scan import selective_scan_fn
from mamba_kernels.selective_state_update import selective_state_update, selective_state_update_ref

HALF_TYPES = [
    pytest.param(torch.bfloat16, marks=pytest.mark.gpu),
    pytest.param(torch.float16, marks=pytest.mark.gpu),
]


def make_inputs(
    device,
    batch=2,
    nheads=4,
    headdim=17,
    d_state=16,
    ngroups=2,
    tied=True,
    dtype=torch.float32,
    heads=True,
    seed=0,
):
    """Arguments of selective_state_update by name; the weights float32, the activations `dtype`."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    if tied:
        dt, deltaA = (randn(batch, nheads)[..., None].expand(-1, -1, headdim) for _ in range(2))
        dt_bias, D = (randn(nheads)[:, None].expand(-1, headdim) for _ in range(2))
        A = (-1 - randn(nheads).abs())[:, None, None].expand(-1, headdim, d_state)
    else:
        dt, deltaA = (randn(batch, nheads, headdim) for _ in range(2))
        dt_bias, D = (randn(nheads, headdim) for _ in range(2))
        A = -1 - randn(nheads, headdim, d_state).abs()
    args = dict(
        state=randn(batch, nheads, headdim, d_state).to(dtype),
        x=randn(batch, nheads, headdim).to(dtype),
        dt=dt.to(dtype),
        A=A,
        B=randn(batch, ngroups, d_state).to(dtype),
        C=randn(batch, ngroups, d_state).to(dtype),
        D=D,
        z=randn(batch, nheads, headdim).to(dtype),
        dt_bias=dt_bias,
        deltaA=deltaA.abs().to(dtype),
    )
    if not heads:
        args = {k: v.squeeze(0 if k in ("A", "D", "dt_bias") else 1) for k, v in args.items()}
    return {name: tensor.to(device) for name, tensor in args.items()}


def to_float64(args):
    return {
        k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in args.items()
    }


def cloned(args):
    """The arguments with a state of their own; expanded axes stay expanded."""
    return {**args, "state": args["state"].clone()}


def step_by_loops(args, discretization):
    """The module's equation, one element at a time in float64; no broadcasting to go wrong."""
    a = to_float64(cloned(args))
    batch, nheads, headdim, d_state = a["state"].shape
    ratio = nheads // a["B"].shape[1]
    out = torch.empty(batch, nheads, headdim, dtype=torch.float64)
    for b, h, p in itertools.product(range(batch), range(nheads), range(headdim)):
        delta = F.softplus(a["dt"][b, h, p] + a["dt_bias"][h, p])
        total = a["D"][h, p] * a["x"][b, h, p]
        for n in range(d_state):
            A, B, C = a["A"][h, p, n], a["B"][b, h // ratio, n], a["C"][b, h // ratio, n]
            step = a["deltaA"][b, h, p] if "deltaA" in a else delta
            decay = torch.exp(step * A)
            gain = {
                "mamba": delta,
                "zoh": (torch.exp(delta * A) - 1) / A,
                "bilinear": delta / (1 - delta * A / 2),
                "dirac": torch.ones(()).double(),
            }[discretization]
            if discretization == "bilinear":
                decay = (1 + step * A / 2) / (1 - step * A / 2)
            a["state"][b, h, p, n] = decay * a["state"][b, h, p, n] + gain * B * a["x"][b, h, p]
            total = total + C * a["state"][b, h, p, n]
        out[b, h, p] = total * F.silu(a["z"][b, h, p])
    return out, a["state"]


def check_triton(args, **options):
    """Triton's output and state must be as close to float64 as the torch reference in the same dtype."""
    wide, narrow, ours = to_float64(cloned(args)), cloned(args), cloned(args)
    out64 = selective_state_update_ref(**wide, dt_softplus=True, **options)
    out_ref = selective_state_update_ref(**narrow, dt_softplus=True, **options)
    with use_backend("triton"):
        out = selective_state_update(**ours, dt_softplus=True, **options)
    assert out.dtype == args["x"].dtype
    assert_close_as_reference(out, out64, out_ref)
    assert_close_as_reference(ours["state"], wide["state"], narrow["state"])


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("discretization", DISCRETIZATIONS)
def test_the_reference_is_the_equation_element_by_element(discretization, asynchronous):
    args = make_inputs("cpu", nheads=4, headdim=3, d_state=5, ngroups=2, tied=False)
    if not asynchronous:
        del args["deltaA"]
    wide = to_float64(cloned(args))
    out = selective_state_update_ref(**wide, dt_softplus=True, discretization=discretization)
    expected, state = step_by_loops(args, discretization)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(wide["state"], state, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("discretization", DISCRETIZATIONS)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_steps_are_the_scan(discretization, asynchronous):
    args = make_inputs("cpu", heads=False, nheads=1, ngroups=1, tied=False)
    args = {name: tensor.double() for name, tensor in args.items()}
    A, D, bias = args["A"], args["D"], args["dt_bias"]
    u, delta, z, deltaA = (
        torch.stack([args[n], 0.7 * args[n], -args[n]], -1) for n in ("x", "dt", "z", "dt")
    )
    deltaA = deltaA.abs() if asynchronous else None
    B, C = (torch.stack([t, t.flip(-1), 2 * t], -1) for t in (args["B"], args["C"]))
    expected, last = selective_scan_fn(
        u, delta, A, B, C, D, z, bias, deltaA, True, True, discretization, initial_state=args["state"]
    )
    for t in range(3):
        step = None if deltaA is None else deltaA[..., t]
        out = selective_state_update(
            args["state"], u[..., t], delta[..., t], A, B[..., t], C[..., t], D, z[..., t], bias, True,
            deltaA=step, discretization=discretization,
        )  # fmt: skip
        torch.testing.assert_close(out, expected[..., t], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(args["state"], last, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF_TYPES])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "headdim, d_state, ngroups", [(64, 128, 1), (1, 16, 4), (17, 33, 2), (128, 256, 2), (5, 1, 1)]
)
def test_triton_agrees_on_every_shape(device, nan_filled_empty, headdim, d_state, ngroups, tied, dtype):
    args = make_inputs(device, headdim=headdim, d_state=d_state, ngroups=ngroups, tied=tied, dtype=dtype)
    del args["deltaA"]
    check_triton(args)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize("discretization", DISCRETIZATIONS)
def test_triton_agrees_on_every_discretization(device, nan_filled_empty, discretization, heads, asynchronous):
    sizes = dict(nheads=2, ngroups=2) if heads else dict(nheads=1, ngroups=1, headdim=80, tied=False)
    args = make_inputs(device, heads=heads, **sizes)
    if not asynchronous:
        del args["deltaA"]
    check_triton(args, discretization=discretization)


@pytest.mark.parametrize("missing", ["D", "z", "dt_bias"])
def test_triton_agrees_without_an_optional_argument(device, nan_filled_empty, missing):
    args = make_inputs(device)
    del args[missing], args["deltaA"]
    check_triton(args)


def test_untied_steps_with_tied_A_are_not_taken_for_tied(device):
    args = make_inputs(device)
    args["dt"] = args["dt"] + torch.randn_like(args["x"])
    check_triton(args)


def test_triton_reads_and_writes_through_any_strides(device):
    args = make_inputs(device, tied=False)
    strided = {k: v.transpose(0, -1).contiguous().transpose(0, -1) for k, v in args.items()}
    wide, narrow = to_float64(cloned(args)), cloned(args)
    out64 = selective_state_update_ref(**wide)
    out_ref = selective_state_update_ref(**narrow)
    with use_backend("triton"):
        out = selective_state_update(**strided)
    assert_close_as_reference(out, out64, out_ref)
    assert_close_as_reference(strided["state"], wide["state"], narrow["state"])


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_slots_advance_alone_and_padding_rows_touch_nothing(device, nan_filled_empty, backend):
    args = make_inputs(device, batch=3)
    pool = torch.randn(7, *args["state"].shape[1:], device=device)
    before = pool.clone()
    slots = torch.tensor([5, -1, 2], device=device, dtype=torch.int32)
    with use_backend(backend):
        out = selective_state_update(**{**args, "state": pool}, state_batch_indices=slots)
        rows = before[[5, 0, 2]].clone()
        alone = selective_state_update(**{**args, "state": rows})
    torch.testing.assert_close(out[[0, 2]], alone[[0, 2]], rtol=0, atol=0)
    assert (out[1] == 0).all()
    torch.testing.assert_close(pool[[5, 2]], rows[[0, 2]], rtol=0, atol=0)
    untouched = [0, 1, 3, 4, 6]
    torch.testing.assert_close(pool[untouched], before[untouched], rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_zoh_tends_to_the_step_where_A_tends_to_zero(device, backend):
    args = make_inputs(device, tied=False)
    del args["deltaA"]
    args["A"] = args["A"].clone()
    args["A"][:, ::2] = 0
    args["A"][:, 1::4] *= 1e-6
    wide = to_float64(cloned(args))
    selective_state_update_ref(**wide, dt_softplus=True, discretization="zoh")
    with use_backend(backend):
        selective_state_update(**args, dt_softplus=True, discretization="zoh")
    torch.testing.assert_close(args["state"].double(), wide["state"], rtol=1e-5, atol=1e-6)


def test_softplus_keeps_small_and_large_steps(device):
    args = make_inputs(device, batch=8)
    del args["deltaA"], args["D"], args["z"]
    steps = torch.tensor([-60.0, -20, -12, -6, 0, 19, 21, 200], device=device)
    args["dt"] = steps[:, None, None].expand(8, 4, 17)
    args["dt_bias"] = torch.zeros(4, 1, device=device).expand(4, 17)
    args["A"] = torch.zeros(4, 1, 1, device=device).expand(4, 17, 16)  # no decay: state = step * B * x
    args["state"].zero_()
    with use_backend("triton"):
        selective_state_update(**args, dt_softplus=True)
    expected = F.softplus(steps.double())[:, None, None, None]
    inputs = args["B"].repeat_interleave(2, dim=1)[:, :, None, :] * args["x"][..., None]
    torch.testing.assert_close(args["state"].double(), expected * inputs.double(), rtol=1e-5, atol=0)


@pytest.mark.gpu
def test_offsets_past_two_to_the_31_elements():
    """Rows of the batch 2^30 + 64 elements apart: the third lies past 2^31 though its stride fits int32."""
    args = make_inputs("cuda", batch=3, dtype=torch.bfloat16)
    size = args["state"][0].numel()
    buffer = torch.empty(2 * (2**30 + 64) + size, dtype=torch.bfloat16, device="cuda")
    far = buffer.as_strided((3, *args["state"].shape[1:]), (2**30 + 64, *args["state"].stride()[1:]))
    far.copy_(args["state"])
    with use_backend("triton"):
        out = selective_state_update(**{**args, "state": far})
        expected = selective_state_update(**args)
    assert torch.equal(out, expected) and torch.equal(far, args["state"])


@pytest.mark.parametrize(
    "name, change",
    [
        ("x", lambda t: t[..., :-1]),
        ("dt", lambda t: t[:1]),
        ("A", lambda t: t[..., :-1]),
        ("B", lambda t: t[:, :, :-1]),
        ("C", lambda t: t[:, :1]),
        ("D", lambda t: t[0]),
        ("z", lambda t: t[:, :1]),
        ("dt_bias", lambda t: t[:1]),
        ("deltaA", lambda t: t[..., 0]),
        ("discretization", lambda t: "euler"),
        ("state_batch_indices", lambda t: torch.zeros(3, dtype=torch.int32)),
        ("state_batch_indices", lambda t: torch.zeros(2)),
    ],
)
def test_an_argument_that_does_not_fit_is_named(name, change):
    args = {**make_inputs("cpu"), "discretization": "mamba"}
    args[name] = change(args.get(name))
    with pytest.raises(ValueError, match=rf"^{name}: expected .*, got "):
        selective_state_update(**args)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF_TYPES])
@pytest.mark.parametrize("slots", [None, [2, -1]])
@pytest.mark.parametrize("tied", [True, False])
def test_a_program_of_several_tiles_and_a_last_one_past_the_end(device, nan_filled_empty, tied, slots, dtype):
    from mamba_kernels.selective_state_update_triton import launch

    args = make_inputs(device, tied=tied, dtype=dtype)
    indices = None
    if slots is not None:
        args["state"] = torch.cat([args["state"], args["state"][:1]])
        indices = torch.tensor(slots, dtype=torch.int32, device=device)
    wide, narrow, ours = to_float64(cloned(args)), cloned(args), cloned(args)
    out64, out_ref = (
        selective_state_update_ref(**given, dt_softplus=True, state_batch_indices=indices)
        for given in (wide, narrow)
    )
    names = ("state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias")
    with use_backend("triton"):
        out = launch(
            *(ours[name] for name in names), True, indices, ours["deltaA"], "mamba",
            {"BLOCK_P": 4, "TILES": 3, "num_warps": 1},
        )  # fmt: skip
    assert_close_as_reference(out, out64, out_ref)
    assert_close_as_reference(ours["state"], wide["state"], narrow["state"])


@pytest.mark.parametrize("dim", [1, 2, 3, 4, 5])
def test_a_program_of_more_rows_than_there_are_touches_no_others(dim, device, nan_filled_empty):
    # Its tiles divide the rows, but all of them together pass the last one.
    from mamba_kernels.selective_state_update_triton import launch

    args = make_inputs(device, headdim=dim)
    wide, ours = to_float64(cloned(args)), cloned(args)
    out64 = selective_state_update_ref(**wide, dt_softplus=True)
    names = ("state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias")
    with use_backend("triton"):
        out = launch(
            *(ours[name] for name in names), True, None, ours["deltaA"], "mamba",
            {"BLOCK_P": 1, "TILES": 4, "num_warps": 1},
        )  # fmt: skip
    assert_close_as_reference(out, out64, selective_state_update_ref(**args, dt_softplus=True))
    assert_close_as_reference(ours["state"], wide["state"], args["state"])
