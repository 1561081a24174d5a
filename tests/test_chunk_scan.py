"""The SSD operation against the recurrence in float64, on every path that computes it."""

from functools import partial

import pytest
import torch

from kernel_testing import assert_close_as_reference
from mamba_kernels.chunk_scan import (
    mamba_chunk_scan_combined,
    mamba_chunk_scan_combined_ref,
    ssd_recurrent_ref,
)
from mamba_kernels.chunk_scan_torch import scan_sequences, ssd_chunked

# (batch, seqlen, nheads, headdim, ngroups, d_state). Blocks are 32 tokens in float32 and 128 in 16 bits.
SHAPES = [
    (1, 1, 2, 16, 1, 16),
    (2, 13, 4, 16, 2, 16),
    (1, 31, 2, 64, 1, 128),
    (1, 32, 6, 16, 3, 32),
    (2, 33, 4, 8, 4, 24),
    (1, 67, 3, 3, 1, 5),
    (1, 127, 2, 80, 1, 64),
    (1, 128, 1, 128, 1, 16),
    (1, 129, 2, 32, 1, 256),
    (1, 259, 2, 17, 2, 16),
]
HALF_TYPES = [
    pytest.param(torch.bfloat16, marks=pytest.mark.gpu),
    pytest.param(torch.float16, marks=pytest.mark.gpu),
]


def make_inputs(device, shape, dtype=torch.float32, seed=0, decay=1.0, **changes):
    """Arguments of the scan by name: activations in `dtype`, weights in float32."""
    batch, seqlen, nheads, headdim, ngroups, d_state = shape
    generator = torch.Generator().manual_seed(seed)

    def randn(*size):
        return torch.randn(*size, generator=generator)

    args = dict(
        x=randn(batch, seqlen, nheads, headdim).to(dtype),
        dt=randn(batch, seqlen, nheads).to(dtype),
        A=-decay * torch.rand(nheads, generator=generator),
        B=randn(batch, seqlen, ngroups, d_state).to(dtype),
        C=randn(batch, seqlen, ngroups, d_state).to(dtype),
        D=randn(nheads),
        z=randn(batch, seqlen, nheads, headdim).to(dtype),
        dt_bias=randn(nheads) - 2,
        initial_states=randn(batch, nheads, headdim, d_state),
        dt_softplus=True,
        return_final_states=True,
    )
    args.update(changes)
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in args.items()}


def to_float64(args):
    return {
        k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in args.items()
    }


def recurrence(args):
    return ssd_recurrent_ref(**to_float64(args))


def scan(args, chunk_size=64):
    return mamba_chunk_scan_combined(**args, chunk_size=chunk_size)


def check_scan(args):
    """Every output of the scan against the recurrence, by the reference's own error in the same dtype."""
    for out, expected, same_dtype in zip(
        scan(args), recurrence(args), mamba_chunk_scan_combined_ref(**args, chunk_size=64), strict=True
    ):
        assert out.dtype == same_dtype.dtype
        assert_close_as_reference(out, expected, same_dtype)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF_TYPES])
@pytest.mark.parametrize("shape", SHAPES)
def test_scan_equals_the_recurrence(backend, device, nan_filled_empty, shape, dtype):
    check_scan(make_inputs(device, shape, dtype))


def test_bfloat16_scan_errs_no_more_than_the_reference_does(backend, device):
    # The interpreter truncates where a GPU rounds, which the factor of 3 allows for.
    check_scan(make_inputs(device, (1, 150, 4, 32, 2, 32), torch.bfloat16))


@pytest.mark.parametrize("chunk_size", [1, 4, 64])
def test_chunked_references_equal_the_recurrence_in_float64(chunk_size):
    args = make_inputs("cpu", (2, 13, 4, 5, 2, 3), seq_idx=torch.tensor([[0] * 6 + [2] * 7, [5] * 13]))
    args = to_float64(args)
    expected = ssd_recurrent_ref(**args)
    chunked = mamba_chunk_scan_combined_ref(**args, chunk_size=chunk_size)
    blocked = scan_sequences(partial(ssd_chunked, block=chunk_size, blocks=2), **args)
    for result in (chunked, blocked):
        for out, oracle in zip(result, expected, strict=True):
            assert out.dtype == torch.float64
            torch.testing.assert_close(out, oracle, rtol=1e-12, atol=1e-12)


def test_two_tokens_follow_the_equation_by_hand():
    x, B, C = (torch.tensor([[[[v]], [[w]]]]) for v, w in ((2.0, 3.0), (5.0, 7.0), (11.0, 13.0)))
    y = mamba_chunk_scan_combined(
        x, torch.tensor([[[0.5], [2.0]]]), torch.tensor([-1.0]), B, C, 64, D=torch.tensor([10.0])
    )
    first = 0.5 * 2 * 5
    second = torch.tensor(-2.0).exp().item() * first + 2 * 3 * 7
    torch.testing.assert_close(y.flatten(), torch.tensor([first * 11 + 20, second * 13 + 30]))


@pytest.mark.parametrize("without", ["D", "z", "dt_bias", "initial_states", "return_final_states"])
def test_every_option_may_be_left_out(backend, device, without):
    args = make_inputs(device, (2, 37, 4, 8, 2, 16))
    del args[without]
    out, expected = scan(args), recurrence(args)
    if without == "return_final_states":
        out, expected = (out,), (expected,)
    for a, b in zip(out, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


def test_skip_may_be_per_channel(backend, device):
    check_scan(make_inputs(device, (2, 37, 4, 8, 2, 16), D=torch.randn(4, 8)))


@pytest.mark.parametrize("dt_softplus", [False, True])
@pytest.mark.parametrize("dt_limit", [(0.0, float("inf")), (0.05, 0.4)])
def test_steps_are_clamped_after_softplus(backend, device, dt_limit, dt_softplus):
    check_scan(
        make_inputs(device, (1, 40, 4, 8, 1, 16), dt_limit=dt_limit, dt_softplus=dt_softplus, z=None, D=None)
    )


def test_tiny_steps_keep_their_relative_precision(backend, device):
    args = make_inputs(device, (1, 3, 2, 4, 1, 16), D=None, z=None, initial_states=None)
    args["dt_bias"] = torch.full((2,), -14.0, device=device)
    for out, expected in zip(scan(args), recurrence(args), strict=True):
        torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=0)


def test_chunk_size_does_not_change_a_bit(backend, device):
    args = make_inputs(device, (1, 70, 2, 8, 1, 16))
    for a, b in zip(scan(args, 7), scan(args, 256), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("token", [0, 8, 31, 32, 64, 69])
def test_no_output_depends_on_a_later_token(backend, device, token):
    # 70 tokens are more than two blocks, below which a decay over the wrong axis goes unseen.
    args = make_inputs(device, (1, 70, 2, 8, 1, 16))
    before = scan(args)[0]
    changed = {k: args[k].clone() for k in ("x", "dt", "B", "C")}
    for tensor in changed.values():
        tensor[:, token] += 1
    after = scan({**args, **changed})[0]
    assert torch.equal(before[:, :token], after[:, :token])
    assert not torch.equal(before[:, token], after[:, token])


@pytest.mark.parametrize("seqlen", [1, 31, 32, 33, 63, 64, 67])
def test_strong_decay_stays_finite_at_every_tail(backend, device, seqlen):
    args = make_inputs(device, (1, seqlen, 2, 8, 1, 16), A=torch.tensor([-16.0, -0.01]), dt_bias=None)
    args["dt"] = torch.full_like(args["dt"], 5.0)
    check_scan(args)


def test_head_reads_the_group_of_its_block_of_heads(backend, device):
    args = make_inputs(device, (1, 9, 4, 8, 2, 16), z=None)
    alone = {**args, "B": args["B"].repeat_interleave(2, 2), "C": args["C"].repeat_interleave(2, 2)}
    for a, b in zip(scan(args), scan(alone), strict=True):
        torch.testing.assert_close(a, b)


def test_views_are_read_in_place_and_nothing_beside_them(backend, device):
    """x, B and C share one tensor, dt and z another, and NaN lies in all that they leave out."""
    batch, seqlen, nheads, headdim, ngroups, d_state = shape = (2, 65, 3, 5, 1, 7)
    args = make_inputs(device, shape)
    sizes = (nheads * headdim, ngroups * d_state, ngroups * d_state, nheads, nheads * headdim)
    fenced = torch.full((batch + 2, seqlen + 2, sum(sizes) + 2), float("nan"), device=device)
    views = fenced[1:-1, 1:-1, 1:-1].split(sizes, -1)
    x, B, C, dt, z = views
    layout = dict(
        x=x.unflatten(-1, (nheads, headdim)),
        B=B.unflatten(-1, (ngroups, d_state)),
        C=C.unflatten(-1, (ngroups, d_state)),
        dt=dt,
        z=z.unflatten(-1, (nheads, headdim)),
    )
    for name, view in layout.items():
        view.copy_(args[name])
    for out, expected in zip(scan({**args, **layout}), scan(args), strict=True):
        torch.testing.assert_close(out, expected)


def test_any_axis_may_be_the_contiguous_one(backend, device):
    args = make_inputs(device, (2, 40, 4, 8, 2, 16))
    expected = scan(args)
    turned = {k: args[k].transpose(1, -1).contiguous().transpose(1, -1) for k in ("x", "dt", "B", "C", "z")}
    for out, same in zip(scan({**args, **turned}), expected, strict=True):
        torch.testing.assert_close(out, same)


def test_rows_past_two_to_the_31_elements_are_found(backend, device):
    """Row 2 of x starts past 2**31 elements of its buffer, with a stride that fits 32 bits."""
    shape = (3, 40, 2, 8, 1, 16)
    args = make_inputs(device, shape, torch.bfloat16)
    stride = 2**30 + 640
    buffer = torch.empty(2 * stride + 640, dtype=torch.bfloat16, device=device)
    x = buffer.as_strided(args["x"].shape, (stride, 16, 8, 1))
    x.copy_(args["x"])
    for out, expected in zip(scan({**args, "x": x}), scan(args), strict=True):
        assert torch.equal(out, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("seqlen", [65_536, 65_537])
def test_the_tail_of_a_long_sequence_equals_its_parts(device, seqlen):
    # 65,537 tokens of 512 heads of 64 are just more than 2**31 elements.
    args = make_inputs("cpu", (1, 64, 1, 64, 1, 16), torch.bfloat16, z=None, initial_states=None)
    args = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in args.items()}
    generator = torch.Generator(device=device).manual_seed(0)

    def randn(*size):
        return torch.randn(*size, generator=generator, device=device, dtype=torch.bfloat16)

    args.update(x=randn(1, seqlen, 512, 64), dt=randn(1, seqlen, 512))
    args.update(B=randn(1, seqlen, 1, 16), C=randn(1, seqlen, 1, 16))
    args.update({k: args[k].expand(512).contiguous() for k in ("A", "D", "dt_bias")})
    y, state = scan(args)
    half, start = seqlen // 2, None
    for part in (slice(0, half), slice(half, None)):
        piece = {k: args[k][:, part] for k in ("x", "dt", "B", "C")}
        out, start = scan({**args, **piece, "initial_states": start})
    torch.testing.assert_close(y[:, half:], out, rtol=3e-2, atol=3e-2)
    torch.testing.assert_close(state, start, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("segments", [2, 3, 7])
def test_segments_of_a_long_row_chain_to_the_same_result(device, nan_filled_empty, segments):
    from mamba_kernels.chunk_scan_fwd_triton import launch_forward

    # Five blocks: segments of unlike lengths, and with 7 some of none.
    args = make_inputs(device, (1, 70, 2, 8, 1, 16), z=None)
    inputs = [args[k] for k in ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states")]
    config = {
        "BLOCK": 16,
        "states": {"BLOCK_P": 16, "segments": segments, "num_warps": 4, "num_stages": 1},
        "output": {"BLOCK_P": 16, "heads": 1, "num_warps": 4, "num_stages": 1},
    }
    out = launch_forward(*inputs, None, None, True, (0.0, float("inf")), config)
    for result, expected in zip(out, recurrence(args), strict=True):
        torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("memory", [64 << 10, 99 << 10, 227 << 10])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_fit_the_shared_memory_of_any_card(dtype, memory):
    from mamba_kernels.chunk_scan_fwd_triton import Limits, config_for

    for headdim in (16, 64, 100, 256):
        for d_state in (16, 128, 200, 256):
            config = config_for(1, 4096, 8, headdim, 1, d_state, dtype, Limits(memory, 100))
            block, tile = config["BLOCK"], config["output"]["BLOCK_P"]
            padded = 1 << (d_state - 1).bit_length()
            one_stage = (block * padded + padded * tile + block * tile) * dtype.itemsize
            assert one_stage <= memory and min(block, tile) >= 16


def test_no_tokens_leave_the_state_as_it_was(backend, device):
    args = make_inputs(device, (2, 0, 2, 8, 1, 16))
    y, state = scan(args)
    assert y.shape == (2, 0, 2, 8) and torch.equal(state, args["initial_states"])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x", torch.zeros(2, 9, 4)),
        ("x", torch.zeros(2, 9, 4, 8, dtype=torch.int32)),
        ("dt", torch.zeros(2, 8, 4)),
        ("A", torch.zeros(3)),
        ("B", torch.zeros(2, 9, 3, 16)),
        ("C", torch.zeros(2, 9, 2, 15)),
        ("D", torch.zeros(4, 7)),
        ("z", torch.zeros(2, 9, 4, 7)),
        ("dt_bias", torch.zeros(1)),
        ("initial_states", torch.zeros(1, 4, 8, 16)),
        ("seq_idx", torch.zeros(2, 8, dtype=torch.int32)),
        ("cu_seqlens", torch.tensor([0, 9])),
        ("chunk_size", 0),
    ],
)
def test_an_argument_that_does_not_fit_is_named(name, value):
    args = {"chunk_size": 64, **make_inputs("cpu", (2, 9, 4, 8, 2, 16)), name: value}
    with pytest.raises(ValueError, match=rf"^{name}: expected .*, got "):
        mamba_chunk_scan_combined(**args)


def test_programs_fill_the_processors_evenly():
    from mamba_kernels.chunk_scan_blocks_triton import choose_heads

    assert choose_heads(64, 80, 132) == 40  # 128 programs, one round
    assert choose_heads(4, 80, 132) == 3  # 108 programs, one round
    assert choose_heads(1000, 80, 132) == 80  # many rounds: as few programs as can be
