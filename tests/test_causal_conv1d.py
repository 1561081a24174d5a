import math

import pytest
import torch
import torch.nn.functional as F

from kernel_testing import assert_close_as_reference
from mamba_kernels import causal_conv1d_bwd_triton, causal_conv1d_triton
from mamba_kernels.backend import use_backend
from mamba_kernels.causal_conv1d import causal_conv1d_fn, causal_conv1d_ref

pytestmark = pytest.mark.usefixtures("nan_filled_empty")


def make_inputs(dim=37, seqlen=17, width=4, batch=2, bias=True, packed=False, initial=False):
    """Arguments of causal_conv1d_fn by name; the second row of seq_idx ends in padding."""
    generator = torch.Generator().manual_seed(seqlen)
    args = dict(
        x=torch.randn(batch, dim, seqlen, generator=generator),
        weight=torch.randn(dim, width, generator=generator),
        bias=torch.randn(dim, generator=generator) if bias else None,
        seq_idx=None,
        initial_states=torch.randn(batch, dim, width - 1, generator=generator) if initial else None,
    )
    if packed:
        starts = torch.rand(batch, seqlen, generator=generator) < 0.3
        args["seq_idx"] = starts.cumsum(1, dtype=torch.int32)
        args["seq_idx"][1:, seqlen - seqlen // 4 :] = -1
    return args


def fenced(tensor, channel_last):
    """A copy inside a buffer of NaN, so that a read past an edge shows, and of strides odd to any vector."""
    batch, dim, seqlen = tensor.shape
    if channel_last:
        view = tensor.new_full((batch + 2, seqlen + 2, dim + 6), torch.nan)[1:-1, 1:-1, 3:-3].transpose(1, 2)
    else:
        view = tensor.new_full((batch + 2, dim + 2, seqlen + 6), torch.nan)[1:-1, 1:-1, 3:-3]
    return view.copy_(tensor)


def prepared(args, dtype, device="cpu", channel_last=True):
    """The arguments on `device` as leaves; the activations of `dtype`, the weights float32 or wider."""
    ready = {}
    for name, tensor in args.items():
        if tensor is not None and tensor.is_floating_point():
            activation = name in ("x", "initial_states")
            tensor = tensor.to(dtype if activation else torch.promote_types(dtype, torch.float32))
            tensor = tensor.to(device)
            tensor = (fenced(tensor, channel_last) if activation else tensor.clone()).requires_grad_()
        elif tensor is not None:
            tensor = tensor.to(device)
        ready[name] = tensor
    return ready


def run(args, backend, return_final_states=True, activation="silu"):
    """Outputs, and the gradients of a fixed linear functional of them, by name."""
    with use_backend(backend):
        result = causal_conv1d_fn(**args, return_final_states=return_final_states, activation=activation)
    outputs = (
        dict(zip(("out", "final_states"), result, strict=True)) if return_final_states else {"out": result}
    )
    generator = torch.Generator().manual_seed(7)
    loss = sum((y * torch.randn(y.shape, generator=generator).to(y)).sum() for y in outputs.values())
    loss.backward()
    gradients = {"d" + k: v.grad for k, v in args.items() if v is not None and v.requires_grad}
    return {**outputs, **gradients}


def check_kernel(args, device, dtype=torch.float32, channel_last=True, **options):
    """Triton's results must be as close to float64 as those of torch in the same dtype."""
    ref64 = run(prepared(args, torch.float64), "torch", **options)
    same = run(prepared(args, dtype), "torch", **options)
    ours = run(prepared(args, dtype, device, channel_last), "triton", **options)
    assert ours.keys() == ref64.keys()
    for name, result in ours.items():
        assert result.dtype == same[name].dtype, name
        assert_close_as_reference(result, ref64[name], same[name])
    out = ours["out"]
    assert (out.stride(1) if channel_last else out.stride(2)) == 1


def convolve_by_loops(x, weight, bias, seq_idx, initial_states, silu):
    """The module's equation in float64, one token and one tap at a time; and the final states."""
    x, weight = x.double(), weight.double()
    batch, dim, seqlen = x.shape
    width = weight.shape[1]
    nothing = torch.zeros(dim, dtype=torch.float64)
    out = torch.zeros(batch, dim, seqlen, dtype=torch.float64)
    final = torch.zeros(batch, dim, width - 1, dtype=torch.float64)
    for b in range(batch):
        before = [nothing] * (width - 1) if initial_states is None else initial_states[b].double().unbind(1)
        rows = [*before, *x[b].unbind(1)]
        ids = [0] * seqlen if seq_idx is None else seq_idx[b].tolist()
        ids = [ids[0]] * (width - 1) + ids
        for t in range(seqlen):
            now = t + width - 1
            if ids[now] < 0:
                continue
            y = nothing if bias is None else bias.double()
            for k in range(width):
                if ids[now - k] == ids[now]:
                    y = y + weight[:, width - 1 - k] * rows[now - k]
            out[b, :, t] = F.silu(y) if silu else y
        for column in range(width - 1):
            if ids[seqlen + column] == ids[-1] >= 0:
                final[b, :, column] = rows[seqlen + column]
    return out, final


@pytest.mark.parametrize("initial", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("seqlen", [1, 2, 3, 12])
def test_the_reference_is_the_equation(seqlen, width, packed, initial):
    args = make_inputs(5, seqlen, width, packed=packed, initial=initial)
    for silu in (False, True):
        out, final = causal_conv1d_ref(**args, return_final_states=True, activation="swish" if silu else None)
        out64, final64 = convolve_by_loops(**args, silu=silu)
        torch.testing.assert_close(out.double(), out64, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(final.double(), final64, rtol=0, atol=0)


@pytest.mark.parametrize("channel_last", [True, False])
@pytest.mark.parametrize("seqlen", [1, 2, 3, 15, 16, 17, 63, 65])
def test_the_kernels_agree_with_float64_at_the_edges_of_their_blocks(device, seqlen, channel_last):
    check_kernel(make_inputs(seqlen=seqlen), device, channel_last=channel_last)


@pytest.mark.parametrize("channel_last", [True, False])
@pytest.mark.parametrize("initial", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_the_kernels_serve_every_width_with_states_and_packing(device, width, packed, initial, channel_last):
    for seqlen in (2, 19):
        args = make_inputs(dim=17, seqlen=seqlen, width=width, packed=packed, initial=initial)
        check_kernel(args, device, channel_last=channel_last)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("bias", [False, True])
def test_the_kernels_serve_every_activation_and_bias(device, bias, activation):
    args = make_inputs(dim=15, seqlen=9, bias=bias, initial=True)
    check_kernel(args, device, activation=activation, return_final_states=False)


@pytest.mark.gpu
@pytest.mark.parametrize("channel_last", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seqlen", [3, 130, 1027])
def test_the_kernels_keep_half_precision(seqlen, dtype, channel_last):
    args = make_inputs(dim=520, seqlen=seqlen, packed=True, initial=True)
    check_kernel(args, torch.device("cuda"), dtype, channel_last)


@pytest.mark.parametrize(
    "batch, dim, seqlen", [(1, 5376, 8192), (1, 1792, 32768), (8, 5376, 3001), (64, 5376, 2048)]
)
def test_the_programs_of_long_sequences_nearly_fill_whole_rounds_of_an_h200(batch, dim, seqlen):
    config = causal_conv1d_triton.config_for(True, batch, dim, seqlen, torch.bfloat16)
    tokens = config["RUNS"] * config["STEPS"]
    rounds = batch * -(-seqlen // tokens) * -(-dim // config["BLOCK_D"]) / causal_conv1d_triton.AT_ONCE
    assert config["STEPS"] % 4 == 0 and rounds > 0.9 * math.ceil(rounds)


@pytest.mark.parametrize("runs, steps, block_d", [(1, 16, 16), (2, 4, 32), (8, 8, 16), (2, 12, 16)])
def test_block_sizes_change_nothing(device, runs, steps, block_d):
    config = {"RUNS": runs, "STEPS": steps, "BLOCK_D": block_d, "num_warps": 4}
    args = prepared(make_inputs(dim=20, seqlen=35, batch=1, packed=True, initial=True), torch.float32, device)
    x, weight, bias, seq_idx, initial_states = (args[name].detach() for name in args)
    inputs = (x, weight, bias, seq_idx, initial_states)
    final, default_final = torch.empty_like(initial_states), torch.empty_like(initial_states)
    forward = causal_conv1d_triton.causal_conv1d_fwd
    torch.testing.assert_close(
        forward(*inputs, final, True, config), forward(*inputs, default_final, True), rtol=1e-6, atol=1e-6
    )
    torch.testing.assert_close(final, default_final, rtol=0, atol=0)
    backward = causal_conv1d_bwd_triton.causal_conv1d_bwd
    gradients = (torch.cos(x), torch.sin(initial_states), True)
    for ours, default in zip(
        backward(*inputs, *gradients, config), backward(*inputs, *gradients), strict=True
    ):
        torch.testing.assert_close(ours, default, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("cut", [1, 2, 7, 11])
def test_states_continue_the_sequence_exactly(device, cut, backend):
    args = make_inputs(seqlen=12, packed=True)
    args["seq_idx"].clamp_(min=0)
    x, weight, bias, seq_idx, _ = (None if v is None else v.to(device) for v in args.values())
    with use_backend(backend):
        whole, final = causal_conv1d_fn(x, weight, bias, seq_idx, None, True, activation="silu")
        state, parts = None, []
        for part in (slice(0, cut), slice(cut, 12)):
            # A part that opens with a new sequence starts from nothing.
            fresh = part.start > 0 and seq_idx[:, cut] != seq_idx[:, cut - 1]
            if part.start > 0:
                state = state.masked_fill(fresh[:, None, None], 0)
            out, state = causal_conv1d_fn(
                x[..., part], weight, bias, seq_idx[:, part], state, True, activation="silu"
            )
            parts.append(out)
    torch.testing.assert_close(torch.cat(parts, dim=2), whole, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(state, final, rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("seqlen", [2, 40])
def test_final_states_may_replace_the_initial_states_in_place(device, seqlen, backend):
    args = {k: v if v is None else v.to(device) for k, v in make_inputs(seqlen=seqlen, initial=True).items()}
    out, final = causal_conv1d_ref(**args, return_final_states=True)
    window = torch.zeros(2, 37, 4, device=device)  # a decoder's state, one column wider
    window[..., 1:] = args["initial_states"]
    with use_backend(backend):
        args["initial_states"] = window[..., 1:]
        ours, returned = causal_conv1d_fn(**args, return_final_states=True, final_states_out=window[..., 1:])
    torch.testing.assert_close(ours, out, rtol=1e-5, atol=1e-5)
    assert returned.data_ptr() == window[..., 1:].data_ptr()
    torch.testing.assert_close(window, F.pad(final, (1, 0)), rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_final_states_written_to_a_buffer_carry_the_gradient(device, backend):
    args = prepared(make_inputs(seqlen=8), torch.float32, device)
    buffer = torch.zeros(2, 37, 3, device=device)
    with use_backend(backend):
        _, final = causal_conv1d_fn(**args, return_final_states=True, final_states_out=buffer)
    final.sum().backward()
    expected = torch.zeros_like(args["x"])
    expected[..., -3:] = 1
    torch.testing.assert_close(args["x"].grad, expected, rtol=0, atol=0)


def test_a_token_never_meets_what_its_window_does_not_reach(device):
    x = torch.ones(1, 16, 24, device=device)
    x[..., 9] = torch.inf
    with use_backend("triton"):
        for width in (2, 3, 4):
            out = causal_conv1d_fn(x.transpose(1, 2).contiguous().transpose(1, 2), x[0, :, :width].clone())
            assert torch.isfinite(out[..., :9]).all() and torch.isfinite(out[..., 9 + width :]).all()
            assert torch.isinf(out[..., 9 : 9 + width]).all()


def test_gradients_flow_only_to_what_asks_for_them(device):
    args = prepared(make_inputs(seqlen=8, initial=True), torch.float32, device)
    args["x"].requires_grad_(False)
    args["bias"].requires_grad_(False)
    with use_backend("triton"):
        causal_conv1d_fn(**args).sum().backward()
    assert args["x"].grad is None and args["bias"].grad is None
    assert args["weight"].grad is not None and args["initial_states"].grad is not None


@pytest.mark.gpu
def test_gradients_are_the_same_in_every_run():
    args = make_inputs(dim=1030, seqlen=2100, batch=3, packed=True, initial=True)
    first = run(prepared(args, torch.bfloat16, "cuda"), "triton")
    for _ in range(5):
        again = run(prepared(args, torch.bfloat16, "cuda"), "triton")
        for name, value in again.items():
            assert torch.equal(value, first[name]), name


@pytest.mark.gpu
@pytest.mark.parametrize("channel_last", [True, False])
def test_offsets_pass_two_to_the_31(channel_last):
    stride = 2**30 + 64  # it fits int32, three rows of it do not
    flat = torch.empty(3 * stride, device="cuda", dtype=torch.bfloat16)
    inner = (1, 64) if channel_last else (64, 1)
    x = flat.as_strided((3, 64, 64), (stride, *inner)).copy_(torch.randn(3, 64, 64))
    weight = torch.randn(64, 4, device="cuda")
    near = x.clone()
    torch.testing.assert_close(causal_conv1d_fn(x, weight), causal_conv1d_fn(near, weight), rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_current_device_may_be_another_one():
    args = make_inputs(dim=64, seqlen=100)
    with torch.cuda.device(0):
        check_kernel(args, torch.device("cuda:1"))


@pytest.mark.parametrize(
    "name, wrong",
    [
        ("x", torch.zeros(2, 8)),
        ("x", torch.zeros(2, 8, 0)),
        ("weight", torch.zeros(9, 4)),
        ("weight", torch.zeros(8, 5)),
        ("bias", torch.zeros(9)),
        ("seq_idx", torch.zeros(2, 5, dtype=torch.int32)),
        ("initial_states", torch.zeros(2, 8, 4)),
        ("final_states_out", torch.zeros(2, 3, 8)),
        ("activation", "gelu"),
    ],
)
def test_an_argument_that_does_not_fit_is_named(name, wrong):
    args = dict(x=torch.zeros(2, 8, 6), weight=torch.zeros(8, 4), return_final_states=True)
    with pytest.raises(ValueError, match=rf"^{name}: expected .*, got "):
        causal_conv1d_fn(**{**args, name: wrong})
