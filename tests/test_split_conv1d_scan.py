"""The whole mixer between its projections, against its equations written out in float64."""

import pytest
import torch
import torch.nn.functional as F

from mamba_kernels.chunk_scan import ssd_recurrent_ref
from mamba_kernels.split_conv1d_scan import mamba_split_conv1d_scan_combined

NHEADS, HEADDIM, NGROUPS, D_STATE, WIDTH = 4, 8, 2, 16, 4
D_SSM, CONV_DIM = NHEADS * HEADDIM, NHEADS * HEADDIM + 2 * NGROUPS * D_STATE


def make_inputs(device, d_mlp=0, d_out=5, seqlen=37):
    generator = torch.Generator().manual_seed(0)

    def randn(*size):
        return torch.randn(*size, generator=generator).to(device)

    return dict(
        zxbcdt=randn(2, seqlen, 2 * d_mlp + D_SSM + CONV_DIM + NHEADS),
        conv1d_weight=randn(CONV_DIM, WIDTH),
        conv1d_bias=randn(CONV_DIM),
        dt_bias=randn(NHEADS) - 2,
        A=-randn(NHEADS).abs(),
        D=randn(NHEADS),
        chunk_size=16,
        initial_states=randn(2, NHEADS, HEADDIM, D_STATE),
        return_final_states=True,
        rmsnorm_weight=randn(D_SSM),
        rmsnorm_eps=1e-5,
        outproj_weight=randn(d_out, d_mlp + D_SSM),
        outproj_bias=randn(d_out),
        headdim=HEADDIM,
        ngroups=NGROUPS,
        norm_before_gate=False,
    )


def oracle(args):
    """The mixer by its equations; shares only the recurrence with the library."""
    a = {
        k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in args.items()
    }
    d_mlp = (a["zxbcdt"].shape[-1] - D_SSM - CONV_DIM - NHEADS) // 2
    z0, x0, z, xBC, dt = a["zxbcdt"].split((d_mlp, d_mlp, D_SSM, CONV_DIM, NHEADS), -1)
    conv = torch.zeros_like(xBC)
    seq_idx = a.get("seq_idx")
    for t in range(xBC.shape[1]):
        for k in range(WIDTH):
            before = t - (WIDTH - 1 - k)
            if before >= 0:
                term = xBC[:, before] * a["conv1d_weight"][:, k]
                if seq_idx is not None:
                    term = term * (seq_idx[:, before] == seq_idx[:, t])[:, None]
                conv[:, t] += term
    if a["conv1d_bias"] is not None:
        conv = conv + a["conv1d_bias"]
    if a.get("activation", "silu") is not None:
        conv = F.silu(conv)
    x, B, C = conv.split((D_SSM, NGROUPS * D_STATE, NGROUPS * D_STATE), -1)
    y, states = ssd_recurrent_ref(
        x.unflatten(-1, (NHEADS, HEADDIM)), dt, a["A"],
        B.unflatten(-1, (NGROUPS, D_STATE)), C.unflatten(-1, (NGROUPS, D_STATE)),
        D=a["D"], dt_bias=a["dt_bias"], dt_softplus=True, dt_limit=a.get("dt_limit", (0.0, float("inf"))),
        initial_states=a["initial_states"], seq_idx=seq_idx, return_final_states=True,
    )  # fmt: skip
    y, gate = y.flatten(-2), F.silu(z)

    def norm(u):
        groups = u.unflatten(-1, (NGROUPS, -1))
        scale = (groups.square().mean(-1, keepdim=True) + a["rmsnorm_eps"]).rsqrt()
        return (groups * scale).flatten(-2) * a["rmsnorm_weight"]

    if a["rmsnorm_weight"] is None:
        y = y * gate
    else:
        y = norm(y) * gate if a["norm_before_gate"] else norm(y * gate)
    y = torch.cat([F.silu(z0) * x0, y], -1)
    if a["outproj_weight"] is not None:
        y = y @ a["outproj_weight"].T
    if a["outproj_bias"] is not None:
        y = y + a["outproj_bias"]
    return y, states


CHANGES = {
    "as released": {},
    "norm first": {"norm_before_gate": True},
    "gate alone": {"rmsnorm_weight": None},
    "no projection": {"outproj_weight": None, "outproj_bias": None},
    "no biases": {"conv1d_bias": None, "outproj_bias": None},
    "no activation": {"activation": None},
    "from zeros": {"initial_states": None},
    "limits": {"dt_limit": (0.05, 0.3)},
    "packed": {"seq_idx": torch.arange(3).repeat_interleave(torch.tensor([2, 20, 15])).expand(2, -1)},
    "skip per channel": {"D": torch.linspace(-1, 1, D_SSM).view(NHEADS, HEADDIM), "headdim": None},
}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES.keys())
def test_mixer_equals_its_equations(backend, device, changes):
    changes = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in changes.items()}
    args = {**make_inputs(device), **changes}
    for out, expected in zip(mamba_split_conv1d_scan_combined(**args), oracle(args), strict=True):
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)


def test_gated_mlp_beside_the_scan_comes_first(backend, device):
    args = make_inputs(device, d_mlp=6)
    for out, expected in zip(mamba_split_conv1d_scan_combined(**args), oracle(args), strict=True):
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)


def test_states_come_only_when_asked_for(backend, device):
    args = make_inputs(device)
    out = mamba_split_conv1d_scan_combined(**{**args, "return_final_states": False})
    assert torch.equal(out, mamba_split_conv1d_scan_combined(**args)[0])


def test_gradients_reach_every_argument(backend, device):
    args = make_inputs(device, d_mlp=2, seqlen=19)
    names = [k for k, v in args.items() if isinstance(v, torch.Tensor)]

    def gradients(function, dtype):
        leaves = {k: args[k].detach().to(dtype, copy=True).requires_grad_() for k in names}
        out, states = function({**args, **leaves})
        (out.square().sum() + states.square().sum()).backward()
        return {k: leaf.grad for k, leaf in leaves.items()}

    ours = gradients(lambda a: mamba_split_conv1d_scan_combined(**a), torch.float32)
    expected = gradients(oracle, torch.float64)
    for name in names:
        error = (ours[name].double() - expected[name]).norm() / expected[name].norm()
        assert error < 1e-4, name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("zxbcdt", torch.zeros(2, 9, D_SSM + CONV_DIM + NHEADS + 1)),
        ("zxbcdt", torch.zeros(2, 9, D_SSM)),
        ("conv1d_weight", torch.zeros(CONV_DIM - 1, WIDTH)),
        ("headdim", None),
        ("rmsnorm_weight", torch.zeros(D_SSM - 1)),
        ("outproj_weight", torch.zeros(5, D_SSM - 1)),
        ("outproj_bias", torch.zeros(4)),
    ],
)
def test_an_argument_that_does_not_fit_is_named(name, value):
    with pytest.raises(ValueError, match=rf"^{name}: expected .*, got "):
        mamba_split_conv1d_scan_combined(**{**make_inputs("cpu"), name: value})
