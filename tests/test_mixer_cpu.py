"""The CPU's mixer is the recurrence it names, token by token and in pieces of a prompt."""

import math

import pytest
import torch
import torch.nn.functional as F

from mamba_kernels import mixer_cpu
from mamba_kernels.mixer_cpu import MixerCore, RMSNorm

NHEADS, HEADDIM, D_STATE, D_CONV = 4, 8, 6, 4
D_SSM = NHEADS * HEADDIM

OPTIONS = {
    "plain": {},
    "groups": {"ngroups": 2},
    "groups_as_heads": {"ngroups": NHEADS},
    "norm_before_gate": {"ngroups": 2, "norm_before_gate": True},
    "no_norm": {"norm": False},
    "no_conv_bias": {"conv_bias": False},
    "D_per_channel": {"D_has_hdim": True},
    "dt_limited": {"dt_limit": (0.05, 0.2)},
    "conv_of_two": {"d_conv": 2},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())


def make(options: dict, dtype: torch.dtype = torch.float64) -> tuple[dict, MixerCore]:
    """Return random weights in float64, and a core of them rounded to `dtype`."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    ngroups = options.get("ngroups", 1)
    conv_dim = D_SSM + 2 * ngroups * D_STATE
    weights = {
        "conv_weight": normal(conv_dim, options.get("d_conv", D_CONV)) / 2,
        "conv_bias": normal(conv_dim) if options.get("conv_bias", True) else None,
        "dt_bias": normal(NHEADS) - 2,
        "A": -normal(NHEADS).exp(),
        "D": normal(NHEADS, HEADDIM) if options.get("D_has_hdim") else normal(NHEADS),
        "norm_weight": normal(D_SSM) if options.get("norm", True) else None,
    }
    settings = {
        "ngroups": ngroups,
        "dt_limit": options.get("dt_limit", (0.0, math.inf)),
        "eps": 1e-5,
        "norm_before_gate": options.get("norm_before_gate", False),
    }
    rounded = {name: None if tensor is None else tensor.to(dtype) for name, tensor in weights.items()}
    return weights | settings, MixerCore(**rounded, **settings)


def make_tokens(model: dict, batch: int, seqlen: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    widths = (D_SSM, model["conv_weight"].shape[0], NHEADS)
    rows = torch.randn(batch, seqlen, sum(widths), generator=generator, dtype=torch.float64)
    return rows.split(widths, -1)  # slices of one tensor, as in_proj gives them


def make_states(model: dict, batch: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    conv_dim, d_conv = model["conv_weight"].shape
    window = torch.randn(batch, d_conv, conv_dim, generator=generator, dtype=torch.float64)
    state = torch.randn(batch, NHEADS, HEADDIM, D_STATE, generator=generator, dtype=torch.float64)
    return window.transpose(1, 2).to(dtype), state.to(dtype)


def recurrence(model: dict, z, xBC, dt, window, h) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The equations of MixerCore in float64, with plain loops over tokens and heads."""
    ys, ngroups = [], model["ngroups"]
    for t in range(z.shape[1]):
        window = torch.cat([window[..., 1:], xBC[:, t, :, None]], -1)
        conv = (window * model["conv_weight"]).sum(-1)
        conv = F.silu(conv if model["conv_bias"] is None else conv + model["conv_bias"])
        x, B, C = conv.split((D_SSM, ngroups * D_STATE, ngroups * D_STATE), -1)
        step = F.softplus(dt[:, t] + model["dt_bias"]).clamp(*model["dt_limit"])
        y, h = torch.zeros_like(x), h.clone()
        for head in range(NHEADS):
            group = slice(head * ngroups // NHEADS * D_STATE, (head * ngroups // NHEADS + 1) * D_STATE)
            channels = slice(head * HEADDIM, (head + 1) * HEADDIM)
            decay = (step[:, head] * model["A"][head]).exp()[:, None, None]
            h[:, head] = decay * h[:, head] + step[:, head, None, None] * (
                x[:, channels, None] * B[:, None, group]
            )
            y[:, channels] = (h[:, head] * C[:, None, group]).sum(-1) + model["D"][head] * x[:, channels]
        ys.append(gated_norm(model, y, F.silu(z[:, t])))
    return torch.stack(ys, 1), window, h


def gated_norm(model: dict, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    if model["norm_weight"] is None:
        return y * gate
    y = y if model["norm_before_gate"] else y * gate
    groups = y.unflatten(-1, (model["ngroups"], -1))
    y = (groups / (groups.square().mean(-1, keepdim=True) + model["eps"]).sqrt()).flatten(-2)
    y = y * model["norm_weight"]
    return y * gate if model["norm_before_gate"] else y


def assert_close(actual, expected, tolerance: float) -> None:
    for mine, other in zip(actual, expected, strict=True):
        assert (mine.double() - other).norm() <= tolerance * other.norm()


@every_option
def test_step_is_the_recurrence(options):
    model, core = make(options)
    z, xBC, dt = make_tokens(model, batch=3, seqlen=5)
    window, state = make_states(model, 3, torch.float64)
    expected = recurrence(model, z, xBC, dt, window, state)
    y = [core.step(z[:, t].clone(), xBC[:, t], dt[:, t], window, state) for t in range(5)]
    assert_close((torch.stack(y, 1), window, state), expected, 1e-12)


@every_option
@pytest.mark.parametrize("seqlen", [1, 3, 70, 200])  # within a piece, over a chunk, over pieces
def test_prefill_is_the_recurrence(options, seqlen, monkeypatch):
    monkeypatch.setattr(mixer_cpu, "PIECE", 72)
    model, core = make(options)
    tokens = make_tokens(model, batch=2, seqlen=seqlen)
    window, state = make_states(model, 2, torch.float64)
    expected = recurrence(model, *tokens, window, state)
    assert_close((core.prefill(*tokens, window, state), window, state), expected, 1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_other_dtypes_are_near_the_recurrence(dtype, tolerance):
    model, core = make({"ngroups": 2}, torch.float32)
    tokens = make_tokens(model, batch=2, seqlen=100)
    window, state = make_states(model, 2, torch.float64)
    expected = recurrence(model, *tokens, window, state)
    window, state = window.to(dtype), state.float()
    y = core.prefill(*(part.to(dtype) for part in tokens), window, state)
    assert y.dtype == dtype
    assert_close((y, window, state), expected, tolerance)


@pytest.mark.parametrize("rate", [50.0, 1e4])
def test_states_that_decay_within_a_token_stay_finite(rate):
    model, core = make({}, torch.float32)
    model["A"], core.A = model["A"] * rate, core.A * rate
    tokens = make_tokens(model, batch=1, seqlen=100)
    window, state = make_states(model, 1, torch.float64)
    expected = recurrence(model, *tokens, window, state)
    window, state = window.float(), state.float()
    y = core.prefill(*(part.float() for part in tokens), window, state)
    assert_close((y, window, state), expected, 1e-4)


@pytest.mark.parametrize("phase", ["step", "prefill"])
def test_a_narrow_state_is_rounded_once_after_its_output(phase):
    model, core = make({}, torch.float32)
    z, xBC, dt = (part.float() for part in make_tokens(model, batch=2, seqlen=1))
    if phase == "step":
        z, xBC, dt = z[:, 0], xBC[:, 0], dt[:, 0]
    window, narrow = make_states(model, 2, torch.float32)
    narrow = narrow.bfloat16()
    wide, other_window = narrow.float(), window.clone()
    y = getattr(core, phase)(z.clone(), xBC, dt, window, narrow)
    assert torch.equal(y, getattr(core, phase)(z.clone(), xBC, dt, other_window, wide))
    assert torch.equal(narrow, wide.bfloat16())


@pytest.mark.parametrize("ngroups", [1, 4])
def test_norm_of_small_and_large_rows(ngroups):
    weight = torch.linspace(0.5, 2, 32, dtype=torch.float64)
    x = torch.randn(3, 2, 32, dtype=torch.float64) * torch.tensor([1e-6, 1.0, 1e6])[:, None, None]
    groups = x.unflatten(-1, (ngroups, -1))
    expected = groups / (groups.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(RMSNorm(weight, 1e-5, ngroups)(x), expected.flatten(-2) * weight)
