"""Triton kernel of the decode step's projections of a few rows of the batch, on the ordinary cores.

The weight streams through registers, where it also waits for the kernel ahead to end.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from mamba_kernels.decode_epilogue_triton import finish, load_early, load_residual
from mamba_kernels.decode_norm_triton import start_next, unpack, wait_for_previous


@triton.jit
def _load_weight(rows, n_in, step, WORDS: tl.constexpr, BLOCK_W: tl.constexpr):
    """Block `step` of the weight's rows, read once: it need not stay in the cache."""
    w = step * BLOCK_W + tl.arange(0, BLOCK_W)
    mask = n_in[:, None]
    if WORDS % BLOCK_W != 0:
        mask = mask & (w < WORDS)[None, :]
    return tl.load(rows + w[None, :], mask=mask, other=0, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["batch"])
def matvec_kernel(
    scaled_ptr, squares_ptr, weight_ptr, bias_ptr, out_ptr,
    conv_state_ptr, conv_weight_ptr, conv_bias_ptr, slots_ptr,
    residual_ptr, norm_weight_ptr, next_scaled_ptr, next_squares_ptr,
    batch, out_features, parts, eps, stride_scaled, stride_squares, stride_out,
    conv_begin, conv_end, stride_slot, stride_channel, stride_tap,
    stride_residual, stride_next_scaled, stride_next_squares,
    K: tl.constexpr, GROUPS: tl.constexpr, EPILOGUE: tl.constexpr, D_CONV: tl.constexpr,
    ELEMENT: tl.constexpr, PACKED: tl.constexpr, PER_THREAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_PARTS: tl.constexpr,
    PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile of BLOCK_N outputs, tile of BLOCK_M rows of the batch), all of K.

    The first PREFETCH blocks (BLOCK_N, BLOCK_K) of the weight wait in registers for the kernel before.
    A 16-bit weight is read as int32 words (PACKED), see `unpack`.
    """
    start_next(PDL)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_in = n < out_features
    PACK: tl.constexpr = 2 if PACKED else 1
    WORDS: tl.constexpr = K // PACK
    BLOCK_W: tl.constexpr = BLOCK_K // PACK
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    rows = weight_ptr + n.to(tl.int64)[:, None] * WORDS
    blocks = ()
    for step in tl.static_range(PREFETCH):
        blocks += (_load_weight(rows, n_in, step, WORDS, BLOCK_W),)

    first = tl.program_id(1) * BLOCK_M
    m = first + tl.arange(0, BLOCK_M)
    m_in = m < batch
    early = load_early(
        bias_ptr, conv_state_ptr, conv_weight_ptr, conv_bias_ptr, slots_ptr, norm_weight_ptr,
        m, m_in, n, n_in, conv_begin, conv_end, stride_slot, stride_channel, stride_tap, D_CONV, EPILOGUE,
    )  # fmt: skip

    wait_for_previous(PDL)
    residual = load_residual(residual_ptr, m, m_in, n, n_in, stride_residual, EPILOGUE)

    # One row of the batch at a time, all of them against the same block of the weight. The sums of squares
    # are added up last where there are few, so that nothing stands between the waiting and the products.
    LATE: tl.constexpr = GROUPS == 1 and BLOCK_M <= 2
    part = tl.arange(0, BLOCK_PARTS)
    squares = ()
    scales = ()  # 1 / RMS by row and group
    sums = ()  # by row, (BLOCK_N, threads along K)
    for i in tl.static_range(BLOCK_M):
        row = tl.minimum(first + i, batch - 1).to(tl.int64)
        for group in tl.static_range(GROUPS):
            ptrs = squares_ptr + row * stride_squares + group * parts + part
            squares += (tl.load(ptrs, mask=part < parts, other=0.0),)
            if not LATE:
                scales += (tl.rsqrt(tl.sum(squares[i * GROUPS + group], axis=0) / (K // GROUPS) + eps),)
        sums += (tl.zeros((BLOCK_N, BLOCK_K // PER_THREAD), tl.float32),)
    for step in tl.static_range(STEPS):
        if step + PREFETCH < STEPS:
            blocks += (_load_weight(rows, n_in, step + PREFETCH, WORDS, BLOCK_W),)
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        w = unpack(blocks[step], ELEMENT) if PACKED else blocks[step].to(tl.float32)
        grown = ()
        for i in tl.static_range(BLOCK_M):
            row = tl.minimum(first + i, batch - 1).to(tl.int64)
            v = tl.load(scaled_ptr + row * stride_scaled + k, mask=k < K, other=0.0).to(tl.float32)
            if GROUPS > 1:
                for group in tl.static_range(GROUPS):
                    v = tl.where(k // (K // GROUPS) == group, v * scales[i * GROUPS + group], v)
            product = tl.reshape(w * v[None, :], (BLOCK_N, BLOCK_K // PER_THREAD, PER_THREAD))
            grown += (sums[i] + tl.sum(product, axis=2),)
        sums = grown
    y = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for i in tl.static_range(BLOCK_M):
        total = tl.sum(sums[i], axis=1)
        if LATE:
            total *= tl.rsqrt(tl.sum(squares[i], axis=0) / K + eps)
        elif GROUPS == 1:
            total *= scales[i]
        y = tl.where((m == first + i)[:, None], total[None, :], y)
    finish(
        y, early, residual, out_ptr, stride_out, residual_ptr, stride_residual,
        m, m_in, n, n_in, tl.program_id(0),
        next_scaled_ptr, stride_next_scaled, next_squares_ptr, stride_next_squares, stride_tap,
        D_CONV, EPILOGUE,
    )  # fmt: skip


def config_for(batch: int, out_features: int, in_features: int, dtype: torch.dtype) -> dict[str, Any]:
    """Block sizes of a projection of a few rows.

    A program asks for 24 blocks of its rows of the weight, 12 KB a warp, while the kernel ahead still
    runs. 8 rows a program share what is done once for all rows, where they are short or there are very
    many of them; elsewhere 4 rows, to have more of each under way.
    """
    warps = 1 if in_features <= 4096 else 2
    block_k = warps * (512 // dtype.itemsize)
    short = in_features <= 1024 and out_features >= 2048
    rows = 8 if batch > 2 or short or out_features >= 32768 else 4
    return {
        "BLOCK_M": min(8, triton.next_power_of_2(batch)), "BLOCK_N": rows, "BLOCK_K": block_k,
        "PREFETCH": min(triton.cdiv(in_features, block_k), 24 // rows), "num_warps": warps,
    }  # fmt: skip
