"""The decode step's projections and what is fused to them, on either kind of core, against torch."""

import pytest
import torch

from decode_testing import (
    EPS,
    HALF_TYPES,
    Shape,
    cast,
    check_triton,
    normed_out,
    randn,
    random_normed,
    rows_out,
    whole,
)
from mamba_kernels.backend import use_backend
from mamba_kernels.decode_layer import in_proj_step, lm_head_step, out_proj_step
from mamba_kernels.decode_norm import NormBuffers, normalise

VECTOR = {"BLOCK_M": 2, "BLOCK_N": 8, "BLOCK_K": 32, "PREFETCH": 2, "num_warps": 1}
TENSOR = {
    "BLOCK_M": 16, "TILES_M": 2, "BLOCK_N": 16, "SLICES": 2, "PREFETCH": 3, "AHEAD": 2, "num_warps": 2,
}  # fmt: skip
VECTOR_CONFIGS = [pytest.param(None, id="default"), pytest.param(VECTOR, id="vector")]
CONFIGS = [*VECTOR_CONFIGS, pytest.param(TENSOR, id="tensor")]


@pytest.mark.parametrize("dtype", [torch.float32, *HALF_TYPES])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("width, rows, batch", [(24, 37, 1), (100, 16, 3), (33, 50, 17)])
def test_lm_head(device, nan_filled_empty, width, rows, batch, config, dtype):
    args = dict(normed=random_normed(batch, width, 1, seed=1), weight=randn(rows, width, seed=3) / width**0.5)
    check_triton(lm_head_step, args, [], dtype, device, rows_out(batch, rows), config=config)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF_TYPES])
@pytest.mark.parametrize("config", [pytest.param(None, id="default"), pytest.param(TENSOR, id="tensor")])
@pytest.mark.parametrize("ngroups", [1, 2])
def test_long_sums_of_many_rows(device, nan_filled_empty, ngroups, config, dtype):
    """More blocks of K than are on their way at a time, the last of them short."""
    args = dict(normed=random_normed(33, 300, ngroups, seed=1), weight=randn(50, 300, seed=3) / 300**0.5)
    check_triton(lm_head_step, args, [], dtype, device, rows_out(33, 50), config=config)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF_TYPES])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(
    "shape, biases, slots",
    [
        (Shape(batch=1), True, None),
        (Shape(batch=3, d_model=33, d_conv=3, ngroups=1), False, [4, -1, 0]),
        (Shape(batch=9, d_conv=2, nheads=3, ngroups=3), True, None),
    ],
)
def test_in_proj_with_convolution(device, nan_filled_empty, shape, biases, slots, config, dtype):
    pool = shape.batch if slots is None else 5
    args = dict(
        normed=random_normed(shape.batch, shape.d_model, 1, seed=1),
        weight=randn(shape.rows, shape.d_model, seed=3) / shape.d_model**0.5,
        bias=randn(shape.rows, seed=4) if biases else None,
        conv_state=randn(pool, shape.conv_dim, shape.d_conv, seed=5),
        conv_weight=randn(shape.conv_dim, shape.d_conv, seed=6),
        conv_bias=randn(shape.conv_dim, seed=7) if biases else None,
        d_ssm=shape.d_ssm,
        state_batch_indices=None if slots is None else torch.tensor(slots, dtype=torch.int32),
    )
    make_out = rows_out(shape.batch, shape.rows)
    check_triton(in_proj_step, args, ["conv_state"], dtype, device, make_out, config=config)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF_TYPES])
def test_a_program_of_two_tiles_of_rows_and_a_last_one_past_the_batch(device, nan_filled_empty, dtype):
    from mamba_kernels.decode_matmul_triton import config_for

    shape = Shape(batch=33, nheads=139, d_state=4)
    config = config_for(shape.batch, shape.rows, shape.d_model, dtype)
    assert config["TILES_M"] == 2
    args = dict(
        normed=random_normed(shape.batch, shape.d_model, 1, seed=1),
        weight=randn(shape.rows, shape.d_model, seed=3) / shape.d_model**0.5,
        bias=randn(shape.rows, seed=4),
        conv_state=randn(shape.batch, shape.conv_dim, shape.d_conv, seed=5),
        conv_weight=randn(shape.conv_dim, shape.d_conv, seed=6),
        conv_bias=randn(shape.conv_dim, seed=7),
        d_ssm=shape.d_ssm,
    )
    make_out = rows_out(shape.batch, shape.rows)
    check_triton(in_proj_step, args, ["conv_state"], dtype, device, make_out, config=config)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF_TYPES])
@pytest.mark.parametrize(
    "shape, biases, slots",
    [
        (Shape(batch=17, nheads=33), True, None),
        (Shape(batch=3, d_model=33, d_conv=3, ngroups=1), False, [4, -1, 0]),
    ],
)
def test_in_proj_of_whole_rows(device, nan_filled_empty, shape, biases, slots, dtype):
    args = dict(
        normed=whole(shape.batch, shape.d_model, seed=1),
        weight=randn(shape.rows, shape.d_model, seed=3) / shape.d_model**0.5,
        bias=randn(shape.rows, seed=4) if biases else None,
        conv_state=randn(shape.batch if slots is None else 5, shape.conv_dim, shape.d_conv, seed=5),
        conv_weight=randn(shape.conv_dim, shape.d_conv, seed=6),
        conv_bias=randn(shape.conv_dim, seed=7) if biases else None,
        d_ssm=shape.d_ssm,
        state_batch_indices=None if slots is None else torch.tensor(slots, dtype=torch.int32),
    )

    def make_out(dtype, device):  # rows apart, as they are where a row is not whole cache lines
        return torch.empty(shape.batch, shape.rows + 3, dtype=dtype, device=device)[:, : shape.rows]

    check_triton(in_proj_step, args, ["conv_state"], dtype, device, make_out)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF_TYPES])
@pytest.mark.parametrize("normed", ["one group", "whole"])
@pytest.mark.parametrize("width, d_ssm, batch", [(24, 64, 1), (17, 96, 18)])
def test_out_proj_to_whole_rows(device, nan_filled_empty, width, d_ssm, batch, normed, dtype):
    rows = whole(batch, d_ssm, seed=1) if normed == "whole" else random_normed(batch, d_ssm, 1, seed=1)
    args = dict(
        normed=rows,
        weight=randn(width, d_ssm, seed=3) / d_ssm**0.5,
        bias=randn(width, seed=4),
        residual=randn(batch, width, seed=5),
        norm_weight=randn(width, seed=6),
        eps=EPS,
        product=torch.empty(batch, width),
    )

    def make_out(dtype, device):
        return NormBuffers(torch.empty(batch, width, dtype=dtype, device=device), None)

    check_triton(out_proj_step, args, ["residual"], dtype, device, make_out)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF_TYPES])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("width, d_ssm, ngroups, batch", [(24, 64, 1, 1), (17, 96, 3, 3), (40, 60, 2, 18)])
def test_out_proj_with_residual(device, nan_filled_empty, width, d_ssm, ngroups, batch, config, dtype):
    args = dict(
        normed=random_normed(batch, d_ssm, ngroups, seed=1),
        weight=randn(width, d_ssm, seed=3) / d_ssm**0.5,
        bias=randn(width, seed=4),
        residual=randn(batch, width, seed=5),
        norm_weight=randn(width, seed=6),
        eps=EPS,
    )
    options = {"config": config}
    check_triton(out_proj_step, args, ["residual"], dtype, device, normed_out(batch, width), **options)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_a_projection_of_rows_without_norm_scales_nothing(device, weight_dtype, config):
    normed = cast(random_normed(3, 24, 1, seed=1)._replace(squares=None), torch.float32, device)
    normed = normed._replace(scaled=normed.scaled.bfloat16().float())  # exact in either type
    weight = randn(20, 24, seed=2).to(device, weight_dtype)
    out = torch.empty(3, 20, device=device)
    with use_backend("triton"):
        lm_head_step(normed, weight, out, config=config)
    torch.testing.assert_close(out, normed.scaled @ weight.float().T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("config", VECTOR_CONFIGS)
@pytest.mark.parametrize("ngroups", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights_meet_wider_inputs(device, dtype, ngroups, config):
    """All bit patterns come out of the words they are read as; inputs past float16 are scaled first."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).float()
    weight = torch.where(every.abs() < 1e4, every, 1.0)[torch.randperm(2**16)[: 20 * 48]].view(20, 48)
    normed = cast(random_normed(3, 48, ngroups, seed=1), torch.float32, device)
    normed = normed._replace(scaled=normed.scaled * 1e5, squares=normed.squares * 1e10)
    out = torch.empty(3, 20, device=device)
    with use_backend("triton"):
        lm_head_step(normed, weight.to(device, dtype), out, config=config)
    expected = normalise(cast(normed, torch.float64, device)) @ weight.to(device).double().T
    magnitude = normalise(normed).abs().double() @ weight.to(device).abs().double().T
    assert ((out - expected).abs() <= 4 * torch.finfo(torch.float32).eps * magnitude).all()


def test_an_argument_that_does_not_fit_is_named():
    normed = cast(random_normed(2, 24, 1, seed=1), torch.float32, "cpu")
    out = torch.empty(2, 20)
    with pytest.raises(ValueError, match=r"^weight: expected shape \(20, 24\), got \(20, 23\)"):
        lm_head_step(normed, torch.empty(20, 23), out)
    with pytest.raises(ValueError, match=r"^weight: expected a contiguous tensor"):
        lm_head_step(normed, torch.empty(24, 20).T, out)
    with pytest.raises(ValueError, match=r"^out: expected shape"):
        lm_head_step(normed, torch.empty(21, 24), out)
