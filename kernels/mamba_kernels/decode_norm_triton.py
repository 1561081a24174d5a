"""Triton pieces of the decode step that make or read a `Normed`, and the kernels that are only that.

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
def inside(index, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The mask of `index`; where blocks divide the axis a constant, which the compiler drops."""
    if SIZE % BLOCK == 0:
        return tl.full(index.shape, 1, tl.int1)
    else:
        return index < SIZE


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
def store_whole(x, norm_weight, m, n, n_in, width, eps, scaled_ptr, stride_scaled):
    """Write rows m of x (M, N), which are zero past their width, normalised."""
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / width + eps)
    scaled = x * scale[:, None] * norm_weight.to(tl.float32)[None, :]
    ptrs = scaled_ptr + m.to(tl.int64)[:, None] * stride_scaled + n[None, :]
    tl.store(ptrs, scaled.to(scaled_ptr.dtype.element_ty), mask=n_in[None, :])


@triton.jit
def _embed_kernel(
    token_ptr, embedding_ptr, norm_weight_ptr, residual_ptr, scaled_ptr, squares_ptr,
    width, eps, stride_token, stride_embedding, stride_residual, stride_scaled, stride_squares,
    BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row of the batch, tile of BLOCK_N columns), one tile where rows are normalised whole. It
    ends the chain of early starts: every kernel of the token before is over when it begins."""
    start_next(PDL)
    m = tl.program_id(0) + tl.arange(0, 1)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_in = n < width
    token = tl.load(token_ptr + m.to(tl.int64) * stride_token).to(tl.int64)
    norm_weight = tl.load(norm_weight_ptr + n, mask=n_in, other=0.0)
    x = tl.load(embedding_ptr + token[:, None] * stride_embedding + n[None, :], mask=n_in[None, :], other=0.0)
    x = x.to(residual_ptr.dtype.element_ty)
    tl.store(residual_ptr + m.to(tl.int64)[:, None] * stride_residual + n[None, :], x, mask=n_in[None, :])
    x = x.to(tl.float32)
    if squares_ptr is None:
        store_whole(x, norm_weight, m, n, n_in, width, eps, scaled_ptr, stride_scaled)
    else:
        store_normed(
            x, norm_weight, m, n, m >= 0, n_in, tl.program_id(1),
            scaled_ptr, stride_scaled, squares_ptr, stride_squares,
        )  # fmt: skip


@triton.jit(do_not_specialize=["parts"])
def _residual_kernel(
    product_ptr, squares_ptr, bias_ptr, residual_ptr, norm_weight_ptr, out_ptr,
    width, parts, group_size, eps_in, eps, stride_product, stride_squares, stride_residual, stride_out,
    BLOCK_N: tl.constexpr, BLOCK_PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row of the batch): residual += a product, scaled by 1 / RMS of what was multiplied, plus
    its bias; and the next norm, of the whole row."""
    start_next(PDL)
    m = tl.program_id(0) + tl.arange(0, 1)
    n = tl.arange(0, BLOCK_N)
    n_in = n < width
    row = m.to(tl.int64)[:, None]
    residual_ptrs = residual_ptr + row * stride_residual + n[None, :]
    norm_weight = tl.load(norm_weight_ptr + n, mask=n_in, other=0.0)
    residual = tl.load(residual_ptrs, mask=n_in[None, :], other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    x = tl.load(product_ptr + row * stride_product + n[None, :], mask=n_in[None, :], other=0.0)
    x = x.to(tl.float32)
    if squares_ptr is not None:
        scale = rstd(squares_ptr, stride_squares, m, m >= 0, 0, parts, group_size, eps_in, 1, BLOCK_PARTS)
        x *= scale[:, None]
    if bias_ptr is not None:
        x += tl.load(bias_ptr + n, mask=n_in, other=0.0).to(tl.float32)[None, :]
    x = (x + residual).to(residual_ptr.dtype.element_ty)
    tl.store(residual_ptrs, x, mask=n_in[None, :])
    store_whole(x.to(tl.float32), norm_weight, m, n, n_in, width, eps, out_ptr, stride_out)


@triton.jit(do_not_specialize=["parts"])
def _normalise_kernel(
    scaled_ptr, squares_ptr, out_ptr, parts, group_size, eps, stride_scaled, stride_squares, stride_out,
    BLOCK_N: tl.constexpr, BLOCK_PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row of the batch, group): apply 1 / RMS, in blocks of BLOCK_N columns of the group."""
    start_next(PDL)
    wait_for_previous(PDL)
    m = tl.program_id(0) + tl.arange(0, 1)
    group = tl.program_id(1)
    scale = tl.full((1,), 1.0, tl.float32)
    if squares_ptr is not None:
        scale = rstd(squares_ptr, stride_squares, m, m >= 0, group, parts, group_size, eps, 1, BLOCK_PARTS)
    row = m.to(tl.int64)[:, None]
    for begin in range(0, group_size, BLOCK_N):
        n = begin + tl.arange(0, BLOCK_N)
        n_in = (n < group_size)[None, :]
        column = group * group_size + n[None, :]
        x = tl.load(scaled_ptr + row * stride_scaled + column, mask=n_in, other=0.0).to(tl.float32)
        x = (x * scale[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row * stride_out + column, x, mask=n_in)


def early_start(pdl: bool, tensor: torch.Tensor) -> dict[str, Any]:
    """Launch arguments that turn programmatic dependent launch on where it is asked for and exists."""
    if pdl and tensor.is_cuda and torch.cuda.get_device_capability(tensor.device)[0] >= 9:
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


def late_start(pdl: bool, tensor: torch.Tensor) -> dict[str, Any]:
    """The same for a kernel behind one that is not ours: the next may start early, but not it."""
    return {"PDL": early_start(pdl, tensor)["PDL"]}


def launch_embed(
    token_ids: torch.Tensor,
    embedding: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor,
    scaled: torch.Tensor,
    squares: torch.Tensor | None,
) -> int:
    """Fill residual, scaled and squares (batch, capacity); return how many parts of squares are used."""
    batch, width = residual.shape
    block = triton.next_power_of_2(width)
    if squares is not None:
        block = min(512, block)
    tiles = triton.cdiv(width, block)
    with torch.cuda.device_of(residual):
        _embed_kernel[(batch, tiles)](
            token_ids, embedding, norm_weight, residual, scaled, squares,
            width, eps, token_ids.stride(0), embedding.stride(0), residual.stride(0), scaled.stride(0),
            0 if squares is None else squares.stride(0),
            BLOCK_N=block, num_warps=4, **late_start(True, residual),
        )  # fmt: skip
    return tiles


def residual_warps(block: int) -> int:
    """No more threads than columns: what two hold, one would read while the other updates it in place."""
    return min(4 if block <= 2048 else 8, max(1, block // 32))


def launch_residual(
    normed: Normed,
    product: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    pdl: bool,
) -> None:
    """Add product (batch, width), of normed.scaled and a weight, to the residual; normalise it into out."""
    batch, width = residual.shape
    scaled, squares, eps_in = normed
    block = triton.next_power_of_2(width)
    with torch.cuda.device_of(residual):
        _residual_kernel[(batch,)](
            product, squares, bias, residual, norm_weight, out,
            width, 1 if squares is None else squares.shape[-1], scaled.shape[1], eps_in, eps,
            product.stride(0), 0 if squares is None else squares.stride(0), residual.stride(0), out.stride(0),
            BLOCK_N=block, BLOCK_PARTS=256, num_warps=residual_warps(block),
            **late_start(pdl, residual),
        )  # fmt: skip


def launch_normalise(normed: Normed, out: torch.Tensor, pdl: bool) -> None:
    """Fill out (batch, width) with the normalised rows."""
    scaled, squares, eps = normed
    batch, width = scaled.shape
    groups, parts = (1, 1) if squares is None else squares.shape[1:]
    block = min(1024, triton.next_power_of_2(width // groups))
    with torch.cuda.device_of(out):
        _normalise_kernel[(batch, groups)](
            scaled, squares, out, parts, width // groups, eps,
            scaled.stride(0), 0 if squares is None else squares.stride(0), out.stride(0),
            BLOCK_N=block, BLOCK_PARTS=256, num_warps=4, **early_start(pdl, out),
        )  # fmt: skip
