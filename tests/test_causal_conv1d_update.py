import pytest
import torch
import torch.nn.functional as F

from kernel_testing import assert_close_as_reference
from mamba_kernels.backend import use_backend
from mamba_kernels.causal_conv1d import causal_conv1d_fn, causal_conv1d_update, causal_conv1d_update_ref

pytestmark = pytest.mark.usefixtures("nan_filled_empty")
BACKENDS = ["torch", "triton"]


def make_inputs(seqlen=1, width=4, state_len=4, batch=3, dim=37, ring=False, pool=False, channel_last=False):
    """Arguments of causal_conv1d_update by name; in a pool, row 1 is padding."""
    generator = torch.Generator().manual_seed(seqlen)
    slots = 3 * batch if pool else batch

    def laid_out(batch, columns):
        if channel_last:
            return torch.randn(batch, columns, dim, generator=generator).transpose(1, 2)
        return torch.randn(batch, dim, columns, generator=generator)

    args = dict(
        x=laid_out(batch, seqlen),
        conv_state=laid_out(slots, state_len),
        weight=torch.randn(dim, width, generator=generator),
        bias=torch.randn(dim, generator=generator),
        cache_seqlens=None,
        conv_state_indices=None,
    )
    if ring:
        args["cache_seqlens"] = torch.randint(0, 99, (batch,), generator=generator, dtype=torch.int32)
    if pool:
        args["conv_state_indices"] = torch.randperm(slots, generator=generator)[:batch].int()
        args["conv_state_indices"][1] = -1
    return args


def prepared(args, dtype, device="cpu"):
    """The arguments on `device`: activations and state of `dtype`, the state a copy of the same strides."""
    ready = {}
    for name, tensor in args.items():
        if tensor is not None and tensor.is_floating_point():
            wide = name in ("weight", "bias") and dtype != torch.float64
            tensor = tensor.to(torch.float32 if wide else dtype)
        ready[name] = None if tensor is None else tensor.to(device, copy=True)
    return ready


def step_by_lists(x, conv_state, weight, bias, cache_seqlens, conv_state_indices):
    """What one call means, a row and a token at a time in float64: (out, the states afterwards)."""
    out, states = torch.zeros_like(x.double()), conv_state.double()
    width, state_len = weight.shape[1], conv_state.shape[2]
    for b in range(x.shape[0]):
        slot = b if conv_state_indices is None else conv_state_indices[b].item()
        if slot < 0:
            continue
        columns = list(states[slot].clone().unbind(1))
        if cache_seqlens is None:
            history = columns
        else:
            tip = cache_seqlens[b].item() % state_len
            history = [columns[(tip + i) % state_len] for i in range(1 - width, 0)]
        for t in range(x.shape[2]):
            token = x[b, :, t].double()
            history = [*history, token]
            window = torch.stack(history[-width:], dim=1)
            out[b, :, t] = F.silu((window * weight.double()).sum(1) + bias.double())
            if cache_seqlens is None:
                columns = [*columns[1:], token]
            else:
                columns[(tip + t) % state_len] = token
        states[slot] = torch.stack(columns, dim=1)
    return out, states


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("width, state_len", [(2, 1), (2, 5), (3, 2), (4, 3), (4, 4), (4, 13)])
def test_every_form_of_the_step_is_as_defined(device, width, state_len, ring, pool, backend):
    for seqlen, channel_last in ((1, False), (1, True), (3, True), (4, False), (15, True)):
        args = make_inputs(seqlen, width, state_len, ring=ring, pool=pool, channel_last=channel_last)
        out64, states64 = step_by_lists(**args)
        ours = prepared(args, torch.float32, device)
        with use_backend(backend):
            out = causal_conv1d_update(**ours, activation="silu")
        torch.testing.assert_close(out.double().cpu(), out64, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours["conv_state"].double().cpu(), states64, rtol=0, atol=0)
        if pool:
            assert (out[1] == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("ring", [False, True])
def test_the_kernel_keeps_the_precision_of_its_inputs(dtype, ring):
    args = make_inputs(2, state_len=5, batch=70, dim=2064, ring=ring, pool=True)
    ref64, same, ours = (
        prepared(args, torch.float64),
        prepared(args, dtype),
        prepared(args, dtype, torch.device("cuda")),
    )
    out64, out_same = (causal_conv1d_update_ref(**a, activation="silu") for a in (ref64, same))
    out = causal_conv1d_update(**ours, activation="silu")
    assert_close_as_reference(out, out64, out_same)
    assert torch.equal(ours["conv_state"].cpu(), same["conv_state"])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("prompt", [1, 2, 3, 9])
def test_steps_after_a_prompt_of_any_length_equal_the_whole(device, prompt, backend):
    args = make_inputs(seqlen=prompt + 5)
    x, weight, bias = (args[name].to(device) for name in ("x", "weight", "bias"))
    with use_backend(backend):
        whole = causal_conv1d_fn(x, weight, bias, activation="silu")
        window = torch.full((3, 37, 4), torch.nan, device=device)  # its oldest column is never read
        causal_conv1d_fn(
            x[..., :prompt], weight, bias, return_final_states=True, final_states_out=window[..., 1:]
        )
        for t in range(prompt, prompt + 5):
            out = causal_conv1d_update(x[..., t], window, weight, bias, "silu")
            torch.testing.assert_close(out, whole[..., t], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_step_is_outside_autograd(device, backend):
    args = prepared(make_inputs(), torch.float32, device)
    args["weight"].requires_grad_()
    with use_backend(backend):
        assert not causal_conv1d_update(**args).requires_grad


@pytest.mark.parametrize(
    "name, wrong",
    [
        ("x", torch.zeros(3)),
        ("weight", torch.zeros(8, 1)),
        ("conv_state", torch.zeros(3, 8, 2)),
        ("conv_state", torch.zeros(4, 8, 4)),
        ("cache_seqlens", torch.zeros(4, dtype=torch.int32)),
        ("conv_state_indices", torch.zeros(4, dtype=torch.int32)),
        ("activation", "relu"),
    ],
)
def test_an_argument_that_does_not_fit_is_named(name, wrong):
    args = dict(x=torch.zeros(3, 8), conv_state=torch.zeros(3, 8, 4), weight=torch.zeros(8, 4))
    with pytest.raises(ValueError, match=rf"^{name}: expected .*, got "):
        causal_conv1d_update(**{**args, name: wrong})
