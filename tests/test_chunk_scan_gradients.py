"""Gradients of the SSD operation against autograd through the recurrence in float64."""

import pytest
import torch

from kernel_testing import assert_close_as_reference, rms
from mamba_kernels.chunk_scan import (
    mamba_chunk_scan_combined,
    mamba_chunk_scan_combined_ref,
    ssd_recurrent_ref,
)
from test_chunk_scan import HALF_TYPES, make_inputs, to_float64

# (batch, seqlen, nheads, headdim, ngroups, d_state). Blocks are 16 tokens in float32 and 64 in 16 bits.
SHAPES = [
    (2, 1, 2, 16, 1, 16),
    (1, 16, 2, 8, 2, 16),
    (2, 17, 4, 16, 2, 16),
    (1, 35, 3, 3, 1, 5),
    (1, 33, 2, 64, 1, 128),
    (1, 65, 2, 48, 1, 24),
]
DRAWS = 8


def gradients(function, args, outputs=None, draws=1):
    """Gradients, by name, of fixed random weightings of the function's outputs (or of those chosen).

    With several draws, of as many weightings, along a first axis.
    """
    leaves = {
        k: v.detach().clone().requires_grad_()
        for k, v in args.items()
        if isinstance(v, torch.Tensor) and v.is_floating_point()
    }
    result = function(**{**args, **leaves})
    generator = torch.Generator().manual_seed(1)
    drawn = []
    for _ in range(draws):
        loss = 0
        for index, out in enumerate(result if isinstance(result, tuple) else (result,)):
            weight = torch.randn(out.shape, generator=generator).to(out)
            if outputs is None or index in outputs:
                loss = loss + (out * weight).sum()
        found = torch.autograd.grad(loss, list(leaves.values()), retain_graph=True, allow_unused=True)
        drawn.append({k: g for k, g in zip(leaves, found, strict=True) if g is not None})
    if draws == 1:
        return drawn[0]
    return {name: torch.stack([gradient[name] for gradient in drawn]) for name in drawn[0]}


def scan(**args):
    return mamba_chunk_scan_combined(**args, chunk_size=64)


def reference(**args):
    return mamba_chunk_scan_combined_ref(**args, chunk_size=64)


def check_gradients(args, outputs=None):
    """Every gradient against the recurrence's, by the reference's own error in the same dtype.

    A weight's gradient is one sum of terms that cancel, and the error of one sum is a matter of luck: the
    reference's is measured over several. It comes in float32, but from activations of their dtype, of
    which 4 units of rounding are allowed.
    """
    expected = gradients(ssd_recurrent_ref, to_float64(args), outputs, DRAWS)
    same_dtype = gradients(reference, args, outputs, DRAWS)
    for name, gradient in gradients(scan, args, outputs).items():
        assert gradient.dtype == args[name].dtype, name
        if name in ("A", "D", "dt_bias"):
            own = rms(same_dtype[name].double() - expected[name])
            floor = 4 * torch.finfo(args["x"].dtype).eps * rms(expected[name])
            assert rms(gradient.double() - expected[name][0]) <= max(3 * own, floor), name
        else:
            assert_close_as_reference(gradient, expected[name][0], same_dtype[name][0])


@pytest.mark.parametrize("dtype", [torch.float32, *HALF_TYPES])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_equal_those_of_the_recurrence(backend, device, nan_filled_empty, shape, dtype):
    check_gradients(make_inputs(device, shape, dtype))


def test_gradients_without_gate_skip_bias_and_states(backend, device, nan_filled_empty):
    args = make_inputs(device, (1, 35, 4, 16, 2, 16), return_final_states=False)
    check_gradients({k: v for k, v in args.items() if k not in ("D", "z", "dt_bias", "initial_states")})


@pytest.mark.parametrize("gate", [True, False])
def test_gradients_of_a_skip_per_channel(backend, device, gate):
    args = make_inputs(device, (2, 19, 4, 8, 2, 16), D=torch.randn(4, 8))
    check_gradients(args if gate else {**args, "z": None})


@pytest.mark.parametrize("dt_softplus", [False, True])
def test_a_clamped_step_has_no_gradient(backend, device, dt_softplus):
    args = make_inputs(device, (1, 20, 4, 8, 1, 16), dt_limit=(0.05, 0.2), dt_softplus=dt_softplus)
    check_gradients(args)
    value = (args["dt"] + args["dt_bias"]).double()
    step = torch.nn.functional.softplus(value) if dt_softplus else value
    clamped = (step < 0.05) | (step > 0.2)
    assert clamped.any() and not gradients(scan, args)["dt"][clamped].any()


@pytest.mark.parametrize("outputs", [(0,), (1,)])
def test_gradients_through_one_of_the_outputs(backend, device, outputs):
    args = make_inputs(device, (2, 21, 2, 8, 1, 16))
    if outputs == (0,):
        check_gradients(args, outputs)
        return
    # The last state does not depend on C, D or z.
    result = gradients(scan, args, outputs)
    expected = gradients(ssd_recurrent_ref, to_float64(args), outputs)
    for name in ("x", "dt", "A", "B", "dt_bias", "initial_states"):
        torch.testing.assert_close(result[name].double(), expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seqlen", [1, 15, 16, 17, 31, 33])
def test_strong_decay_gives_finite_gradients_at_every_tail(backend, device, seqlen):
    args = make_inputs(device, (1, seqlen, 2, 8, 1, 16), A=torch.tensor([-16.0, -0.01]), dt_bias=None)
    args["dt"] = torch.full_like(args["dt"], 5.0)
    expected = gradients(ssd_recurrent_ref, to_float64(args))
    for name, gradient in gradients(scan, args).items():
        torch.testing.assert_close(gradient.double(), expected[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("lengths", [(5, 12, 3), (16, 17, 1)])
def test_no_gradient_crosses_packed_sequences(backend, device, nan_filled_empty, lengths):
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    args = make_inputs(device, (1, sum(lengths), 2, 8, 2, 16), seq_idx=ids[None])
    check_gradients(args)
    leaf = args["x"].clone().requires_grad_()
    scan(**{**args, "x": leaf})[0][:, -1].sum().backward()
    assert not leaf.grad[:, : -lengths[-1]].any() and leaf.grad[:, -1].any()


@pytest.mark.parametrize("lengths", [(5, 20, 3), (16, 0, 17)])
def test_gradients_of_sequences_packed_by_bounds(backend, device, nan_filled_empty, lengths):
    args = make_inputs(device, (1, sum(lengths), 4, 8, 2, 16), return_varlen_states=True)
    args["cu_seqlens"] = torch.tensor([0, *lengths], device=device).cumsum(0)
    args["initial_states"] = torch.randn(len(lengths), 4, 8, 16, device=device)
    check_gradients(args)


def test_gradients_are_the_same_bits_each_time(backend, device):
    args = make_inputs(device, (1, 40, 2, 8, 1, 16))
    first, second = gradients(scan, args), gradients(scan, args)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_gradients_sum_over_programs_and_tiles(device, nan_filled_empty):
    """Several tiles of headdim, several programs a group and several segments add up to the same."""
    from mamba_kernels import chunk_scan_bwd_triton as backward

    args = make_inputs(device, (1, 40, 4, 24, 2, 24), return_final_states=False)
    expected = gradients(ssd_recurrent_ref, to_float64(args))
    names = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states")
    out = scan(**args)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    config = {
        "BLOCK": 16,
        "states": {"BLOCK_P": 32, "segments": 3, "num_warps": 4, "num_stages": 1},
        "gradients": {"BLOCK_P": 16, "heads": 1, "num_warps": 4, "num_stages": 1},
        "sums": {"BLOCK_N": 16, "BLOCK_P": 16, "num_warps": 4, "num_stages": 1},
    }
    inputs = [args[name] for name in names]
    result = backward.launch_backward(dout, None, *inputs, None, None, True, (0.0, float("inf")), config)
    for name, gradient in zip(names, result, strict=True):
        torch.testing.assert_close(gradient.double(), expected[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("memory", [99 << 10, 163 << 10, 227 << 10])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_the_backward_fit_the_shared_memory_of_any_card(dtype, memory):
    from mamba_kernels.chunk_scan_bwd_triton import Limits, config_for

    for headdim in (16, 64, 100, 256):
        for d_state in (16, 128, 200, 256):
            config = config_for(1, 4096, 8, headdim, 1, d_state, dtype, Limits(memory, 100))
            block, tile = config["BLOCK"], config["gradients"]["BLOCK_P"]
            padded = 1 << (d_state - 1).bit_length()
            one_stage = 2 * (block * padded + padded * tile + block * tile) * dtype.itemsize
            assert one_stage <= memory and min(block, tile) >= 16


def test_a_card_without_room_for_a_block_is_one_clear_error():
    from mamba_kernels.chunk_scan_bwd_triton import Limits, config_for

    with pytest.raises(ValueError, match=r"^d_state: expected .* 49152 bytes of shared memory, got 256"):
        config_for(1, 4096, 8, 64, 1, 256, torch.float32, Limits(48 << 10, 100))
