"""Triton pieces of the decode step that make or read a `Normed`, and the two kernels that are only that.

A kernel of the decode step may start before the one ahead of it in the stream has ended (programmatic
dependent launch, compute capability 9.0): `start_next` lets the next one start, `wait_for_previous` blocks
until everything ahead has ended. What comes between loads only what no kernel of the same token writes
before: weights, and the layer's own state.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from mamba_kernels.decode_norm import Normed


@triton.jit
def start_next(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def unpack(words, ELEMENT: tl.constexpr):
    """16-bit elements as float32 (M, 2 W), from the int32 words (M, W) they were loaded as.

    Loaded as themselves they would be split where they are loaded, so that a load ahead of
    `wait_for_previous` would have to arrive before that wait instead of during it.
    """
    if ELEMENT == tl.bfloat16:
        low = (words << 16).to(tl.float32, bitcast=True)
        high = (words & -65536).to(tl.float32, bitcast=True)
    else:
        low = (words & 0xFFFF).to(tl.int16).to(ELEMENT, bitcast=True).to(tl.float32)
        high = (words >> 16).to(tl.int16).to(ELEMENT, bitcast=True).to(tl.float32)
    return tl.reshape(tl.join(low, high), (words.shape[0], 2 * words.shape[1]))


@triton.jit
def rstd(
    squares_ptr, stride_batch, m, m_in, group, parts, group_size, eps,
    BLOCK_M: tl.constexpr, BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    """1 / RMS of one group of rows m (BLOCK_M,), from its partial sums of squares."""
    part = tl.arange(0, BLOCK_PARTS)
    rows = squares_ptr + m.to(tl.int64)[:, None] * stride_batch + group * parts
    total = tl.zeros((BLOCK_M,), tl.float32)
    for begin in range(0, parts, BLOCK_PARTS):
        mask = m_in[:, None] & (begin + part < parts)[None, :]
        total += tl.sum(tl.load(rows + (begin + part)[None, :], mask=mask, other=0.0), axis=1)
    return tl.rsqrt(total / group_size + eps)


@triton.jit
def store_normed(
    x, norm_weight, m, n, m_in, n_in, part, scaled_ptr, stride_scaled, squares_ptr, stride_squares
):  # fmt: skip
    """Write the two factors of a tile x (M, N) of rows m, columns n: one partial sum of squares a row."""
    m = m.to(tl.int64)
    both_in = m_in[:, None] & n_in[None, :]
    scaled = (x * norm_weight.to(tl.float32)[None, :]).to(scaled_ptr.dtype.element_ty)
    tl.store(scaled_ptr + m[:, None] * stride_scaled + n[None, :], scaled, mask=both_in)
    square = tl.sum(tl.where(n_in[None, :], x * x, 0.0), axis=1)
    tl.store(squares_ptr + m * stride_squares + part, square, mask=m_in)


@triton.jit
def _embed_kernel(
    token_ptr, embedding_ptr, norm_weight_ptr, residual_ptr, scaled_ptr, squares_ptr,
    width, stride_token, stride_embedding, stride_residual, stride_scaled, stride_squares,
    BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row of the batch, tile of BLOCK_N columns). It ends the chain of early starts: every
    kernel of the token before is over when it begins."""
    start_next(PDL)
    m = tl.program_id(0) + tl.arange(0, 1)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_in = n < width
    token = tl.load(token_ptr + m.to(tl.int64) * stride_token).to(tl.int64)
    norm_weight = tl.load(norm_weight_ptr + n, mask=n_in, other=0.0)
    x = tl.load(embedding_ptr + token[:, None] * stride_embedding + n[None, :], mask=n_in[None, :], other=0.0)
    x = x.to(residual_ptr.dtype.element_ty)
    tl.store(residual_ptr + m.to(tl.int64)[:, None] * stride_residual + n[None, :], x, mask=n_in[None, :])
    store_normed(
        x.to(tl.float32), norm_weight, m, n, m >= 0, n_in, tl.program_id(1),
        scaled_ptr, stride_scaled, squares_ptr, stride_squares,
    )  # fmt: skip


@triton.jit(do_not_specialize=["parts_in"])
def _reduce_kernel(
    partials_ptr, squares_in_ptr, bias_ptr, residual_ptr, norm_weight_ptr, scaled_ptr, squares_ptr,
    width, splits, parts_in, group_size_in, eps_in,
    stride_split, stride_partial, stride_squares_in, stride_residual, stride_scaled, stride_squares,
    BLOCK_N: tl.constexpr, BLOCK_PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row of the batch, tile of BLOCK_N columns): add the split sums of a projection, scaled
    by the RMS of its input, to the residual, and make the next `Normed`."""
    start_next(PDL)
    m = tl.program_id(0) + tl.arange(0, 1)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_in = n < width
    norm_weight = tl.load(norm_weight_ptr + n, mask=n_in, other=0.0)
    wait_for_previous(PDL)
    row = m.to(tl.int64)[:, None]
    residual_ptrs = residual_ptr + row * stride_residual + n[None, :]
    residual = tl.load(residual_ptrs, mask=n_in[None, :], other=0.0).to(tl.float32)
    x = tl.zeros((1, BLOCK_N), tl.float32)
    for split in range(splits):
        partials = partials_ptr + split * stride_split + row * stride_partial
        x += tl.load(partials + n[None, :], mask=n_in[None, :], other=0.0)
    if squares_in_ptr is not None:
        scale = rstd(
            squares_in_ptr, stride_squares_in, m, m >= 0, 0, parts_in, group_size_in, eps_in, 1, BLOCK_PARTS
        )
        x *= scale[:, None]
    if bias_ptr is not None:
        x += tl.load(bias_ptr + n, mask=n_in, other=0.0).to(tl.float32)[None, :]
    x = (x + residual).to(residual_ptr.dtype.element_ty)
    tl.store(residual_ptrs, x, mask=n_in[None, :])
    store_normed(
        x.to(tl.float32), norm_weight, m, n, m >= 0, n_in, tl.program_id(1),
        scaled_ptr, stride_scaled, squares_ptr, stride_squares,
    )  # fmt: skip


def early_start(pdl: bool, tensor: torch.Tensor) -> dict[str, Any]:
    """Launch arguments that turn programmatic dependent launch on where it is asked for and exists."""
    if pdl and tensor.is_cuda and torch.cuda.get_device_capability(tensor.device)[0] >= 9:
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


def launch_embed(
    token_ids: torch.Tensor,
    embedding: torch.Tensor,
    norm_weight: torch.Tensor,
    residual: torch.Tensor,
    scaled: torch.Tensor,
    squares: torch.Tensor,
) -> int:
    """Fill residual, scaled and squares (batch, capacity); return how many parts of squares are used."""
    batch, width = residual.shape
    block = min(512, triton.next_power_of_2(width))
    tiles = triton.cdiv(width, block)
    with torch.cuda.device_of(residual):
        # Started without early_start on purpose, see the kernel; the one after it may start early.
        _embed_kernel[(batch, tiles)](
            token_ids, embedding, norm_weight, residual, scaled, squares,
            width, token_ids.stride(0), embedding.stride(0), residual.stride(0), scaled.stride(0),
            squares.stride(0),
            BLOCK_N=block, PDL=early_start(True, residual)["PDL"], num_warps=4,
        )  # fmt: skip
    return tiles


def launch_reduce(
    normed: Normed,
    partials: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    scaled: torch.Tensor,
    squares: torch.Tensor,
    pdl: bool,
) -> int:
    """Add partials (splits, batch, width), sums over `normed` unscaled, to the residual.

    Returns how many parts of squares (batch, capacity) are used.
    """
    batch, width = residual.shape
    scaled_in, squares_in, eps_in = normed
    block = min(512, triton.next_power_of_2(width))
    tiles = triton.cdiv(width, block)
    parts = 1 if squares_in is None else squares_in.shape[-1]
    with torch.cuda.device_of(residual):
        _reduce_kernel[(batch, tiles)](
            partials, squares_in, bias, residual, norm_weight, scaled, squares,
            width, partials.shape[0], parts, scaled_in.shape[1], eps_in,
            partials.stride(0), partials.stride(1), 0 if squares_in is None else squares_in.stride(0),
            residual.stride(0), scaled.stride(0), squares.stride(0),
            BLOCK_N=block, BLOCK_PARTS=256, num_warps=4,
            **early_start(pdl, residual),
        )  # fmt: skip
    return tiles
