"""Triton kernel of the decode step's projections of many rows of the batch, on the tensor cores.

What costs is not the weight, which is on its way while the kernel ahead still runs, but what must follow
that kernel: the rows, which every program reads again, and the products. So a program takes all of K of a
tile, its warps share K out between them, and a warp loads both operands straight into the registers from
which the tensor cores take them: nothing passes through shared memory, and no warp waits for another until
their sums are added up.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from mamba_kernels.decode_epilogue_triton import finish, load_early, load_residual
from mamba_kernels.decode_norm_triton import start_next, wait_for_previous
from mamba_kernels.triton_launch import PROCESSORS

# Elements of K of a warp in a block: 4 lanes load 8 each, 16 bytes.
SLICE = 32


@triton.jit
def _start_of_tile(ptr, stride, first, rows, R: tl.constexpr, SLICES: tl.constexpr, SLICE: tl.constexpr):
    """Pointers to K's first block of a tile, and its k: rows first, first + 1, ... of a matrix of `rows`.

    (R * SLICES, SLICE), counted as (R // 8, SLICES, 8): Triton then gives 8 lanes a row each, a warp a
    slice and a lane 8 neighbours of it. Past the last row it is read again.
    """
    at = tl.arange(0, R * SLICES)
    row = tl.minimum(first + at // (8 * SLICES) * 8 + at % 8, rows - 1)
    k = (at // 8 % SLICES * SLICE)[:, None] + tl.arange(0, SLICE)[None, :]
    return ptr + row.to(tl.int64)[:, None] * stride + k, k


@triton.jit
def _load_block(
    start, step, VOLATILE: tl.constexpr, K: tl.constexpr, SLICES: tl.constexpr, SLICE: tl.constexpr
):  # fmt: skip
    """Block `step` of K of a tile. VOLATILE: such loads keep their order."""
    ptrs, k = start
    begin: tl.constexpr = step * SLICES * SLICE
    if begin + SLICES * SLICE > K:
        return tl.load(ptrs + begin, mask=k < K - begin, other=0.0, volatile=VOLATILE)
    else:
        return tl.load(ptrs + begin, volatile=VOLATILE)


@triton.jit
def _as_operand(block, R: tl.constexpr, SLICES: tl.constexpr, SLICE: tl.constexpr):
    """A block as (SLICES, R, SLICE), K in the order in which the tensor cores find it where it was loaded.

    A lane has loaded 8 neighbours; a product of 16 takes of a lane 2 elements of either half, and two
    products use the 8 up. The sum over K does not mind the order if it is the same for both operands.
    """
    block = tl.reshape(block, (R // 8, SLICES, 8, 4, SLICE // 16, 2, 2))
    return tl.reshape(tl.permute(block, (1, 0, 2, 4, 5, 3, 6)), (SLICES, R, SLICE))


@triton.jit
def _add_product(
    sums, w, x, step, rows, scales, K: tl.constexpr, GROUPS: tl.constexpr, SCALE_FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SLICES: tl.constexpr, SLICE: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """sums (SLICES, BLOCK_N, BLOCK_M) plus block `step` of the weight times that of the rows."""
    if SCALE_FIRST:
        x = x.to(tl.float32)
        for group in tl.static_range(GROUPS):
            scale = tl.reshape(scales[group], (BLOCK_M // 8, 1, 8))
            scale = tl.reshape(scale.broadcast_to(BLOCK_M // 8, SLICES, 8), (BLOCK_M * SLICES, 1))
            is_group = (step * SLICES * SLICE + rows[1]) // (K // GROUPS) == group
            x = tl.where(is_group, x * scale, x)
    x = x.to(w.dtype)
    if INTERPRET:  # which multiplies bfloat16 by its bits
        w, x = w.to(tl.float32), x.to(tl.float32)
    w = _as_operand(w, BLOCK_N, SLICES, SLICE)
    x = tl.permute(_as_operand(x, BLOCK_M, SLICES, SLICE), (0, 2, 1))
    return tl.dot(w, x, sums, input_precision="ieee")


@triton.jit
def _load_rows(
    scaled_ptr, stride_scaled, squares_ptr, stride_squares, residual_ptr, stride_residual,
    first, batch, n, n_in, parts,
    K: tl.constexpr, GROUPS: tl.constexpr, EPILOGUE: tl.constexpr, BLOCK_M: tl.constexpr,
    SLICES: tl.constexpr, SLICE: tl.constexpr, BLOCK_PARTS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """What a tile of rows from `first` on needs of the kernel before: where its rows begin, the first AHEAD
    blocks of them, partial sums of squares (BLOCK_M, BLOCK_PARTS) of each group of the norm, the residual."""
    m = first + tl.arange(0, BLOCK_M)
    m_in = m < batch
    squares = ()
    part = tl.arange(0, BLOCK_PARTS)
    for group in tl.static_range(GROUPS):
        ptrs = squares_ptr + m.to(tl.int64)[:, None] * stride_squares + (group * parts + part)[None, :]
        squares += (tl.load(ptrs, mask=m_in[:, None] & (part < parts)[None, :], other=0.0, volatile=True),)
    rows = _start_of_tile(scaled_ptr, stride_scaled, first, batch, BLOCK_M, SLICES, SLICE)
    blocks = ()
    for step in tl.static_range(AHEAD):
        blocks += (_load_block(rows, step, True, K, SLICES, SLICE),)
    return rows, blocks, squares, load_residual(residual_ptr, m, m_in, n, n_in, stride_residual, EPILOGUE)


@triton.jit(do_not_specialize=["batch"])
def matmul_kernel(
    scaled_ptr, squares_ptr, weight_ptr, bias_ptr, out_ptr,
    conv_state_ptr, conv_weight_ptr, conv_bias_ptr, slots_ptr,
    residual_ptr, norm_weight_ptr, next_scaled_ptr, next_squares_ptr,
    batch, out_features, parts, eps, stride_scaled, stride_squares, stride_out,
    conv_begin, conv_end, stride_slot, stride_channel, stride_tap,
    stride_residual, stride_next_scaled, stride_next_squares,
    K: tl.constexpr, GROUPS: tl.constexpr, EPILOGUE: tl.constexpr, D_CONV: tl.constexpr,
    SCALE_FIRST: tl.constexpr, INTERPRET: tl.constexpr,
    BLOCK_M: tl.constexpr, TILES_M: tl.constexpr, BLOCK_N: tl.constexpr, SLICES: tl.constexpr,
    SLICE: tl.constexpr, BLOCK_PARTS: tl.constexpr, PREFETCH: tl.constexpr, AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile of BLOCK_N outputs) * (shares of the batch) + (share), all of K; a share is TILES_M
    tiles of BLOCK_M rows, one after the other.

    SLICES: at least 2, as many as warps. The first PREFETCH blocks of the weight wait in registers for the
    kernel before; of the rows a group of AHEAD blocks, not more than PREFETCH, is on its way at a time. All
    of the weight stays in registers from tile to tile. SCALE_FIRST: rows are normalised before they are
    multiplied, not after.
    """
    start_next(PDL)
    shares = tl.cdiv(batch, BLOCK_M * TILES_M)
    tile = tl.program_id(0) // shares
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    n_in = n < out_features
    begin_m = tl.program_id(0) % shares * (BLOCK_M * TILES_M)
    STEPS: tl.constexpr = (K + SLICES * SLICE - 1) // (SLICES * SLICE)
    start = _start_of_tile(weight_ptr, K, tile * BLOCK_N, out_features, BLOCK_N, SLICES, SLICE)
    weights = ()
    for step in tl.static_range(PREFETCH):
        weights += (_load_block(start, step, False, K, SLICES, SLICE),)
    early = ()
    for tile_m in tl.static_range(TILES_M):
        m = begin_m + tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        early += (
            load_early(
                bias_ptr, conv_state_ptr, conv_weight_ptr, conv_bias_ptr, slots_ptr, norm_weight_ptr,
                m, m < batch, n, n_in, conv_begin, conv_end, stride_slot, stride_channel, stride_tap,
                D_CONV, EPILOGUE,
            ),
        )  # fmt: skip

    wait_for_previous(PDL)
    loaded = _load_rows(
        scaled_ptr, stride_scaled, squares_ptr, stride_squares, residual_ptr, stride_residual,
        begin_m, batch, n, n_in, parts,
        K, GROUPS, EPILOGUE, BLOCK_M, SLICES, SLICE, BLOCK_PARTS, AHEAD,
    )  # fmt: skip
    for tile_m in tl.static_range(TILES_M):
        rows, blocks, squares, residual = loaded
        if tile_m + 1 < TILES_M:  # on its way while this one is multiplied
            loaded = _load_rows(
                scaled_ptr, stride_scaled, squares_ptr, stride_squares, residual_ptr, stride_residual,
                begin_m + (tile_m + 1) * BLOCK_M, batch, n, n_in, parts,
                K, GROUPS, EPILOGUE, BLOCK_M, SLICES, SLICE, BLOCK_PARTS, AHEAD,
            )  # fmt: skip
        scales = ()
        if SCALE_FIRST:
            for group in tl.static_range(GROUPS):
                scales += (tl.rsqrt(tl.sum(squares[group], axis=1) / (K // GROUPS) + eps),)
        # A group is multiplied from its last block on. As the loads keep their order, the first product then
        # has all of them under way; the compiler would set each load behind the products of the one before.
        sums = tl.zeros((SLICES, BLOCK_N, BLOCK_M), tl.float32)
        for begin in tl.static_range(0, STEPS, AHEAD):
            if begin > 0:
                blocks = ()
                for step in tl.static_range(begin, min(begin + AHEAD, STEPS)):
                    blocks += (_load_block(rows, step, True, K, SLICES, SLICE),)
            if tile_m == 0:
                for step in tl.static_range(begin + PREFETCH, min(begin + AHEAD + PREFETCH, STEPS)):
                    weights += (_load_block(start, step, False, K, SLICES, SLICE),)
            for step in tl.static_range(min(begin + AHEAD, STEPS) - 1, begin - 1, -1):
                sums = _add_product(
                    sums, weights[step], blocks[step - begin], step, rows, scales,
                    K, GROUPS, SCALE_FIRST, BLOCK_M, BLOCK_N, SLICES, SLICE, INTERPRET,
                )  # fmt: skip
        # Split off as the last axis, the halves come to lie in one lane each, and so does what is left of K.
        halves = tl.reshape(sums, (2, SLICES // 2, BLOCK_N, BLOCK_M)).permute(1, 3, 2, 0)
        low, high = tl.split(halves)
        y = tl.sum(low + high, axis=0)
        if GROUPS == 1 and not SCALE_FIRST:
            y *= tl.rsqrt(tl.sum(squares[0], axis=1) / K + eps)[:, None]
        m = begin_m + tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        finish(
            y, early[tile_m], residual, out_ptr, stride_out, residual_ptr, stride_residual,
            m, m < batch, n, n_in, tile,
            next_scaled_ptr, stride_next_scaled, next_squares_ptr, stride_next_squares, stride_tap,
            D_CONV, EPILOGUE,
        )  # fmt: skip


def blocks_in_flight(
    block_m: int, block_n: int, slices: int, in_features: int, dtype: torch.dtype
) -> dict[str, int]:
    """How many blocks are on their way, where a lane holds 96 words of the weight and 48 of the rows.

    The weight is loaded a group of AHEAD blocks before its turn, which are then held beside the others.
    """
    steps = triton.cdiv(in_features, slices * SLICE)
    prefetch = max(1, 96 // (block_n * dtype.itemsize // 4))
    ahead = max(1, 48 // (block_m * dtype.itemsize // 4))
    if steps > prefetch:
        ahead = max(1, min(ahead, prefetch // 3))
        prefetch = max(ahead, prefetch - ahead)
    return {"PREFETCH": min(steps, prefetch), "AHEAD": min(steps, ahead)}


def config_for(batch: int, out_features: int, in_features: int, dtype: torch.dtype) -> dict[str, Any]:
    """Block sizes of a projection of many rows: by far the fastest on an H200 at 16 to 128 rows.

    Larger tiles read the rows fewer times, but leave no registers for what is loaded next. From 33 rows on,
    programs of two tiles of rows are faster where they still fill the device and their weights fit the
    registers: those of 8 warps, or of 4 where the rows are short.
    """
    programs = triton.cdiv(out_features, 32) * triton.cdiv(batch, 32)
    tiles = 2 if batch > 32 and programs >= PROCESSORS and in_features <= 1536 else 1
    warps = 4 if tiles == 2 and in_features <= 1024 else 8
    return {
        "BLOCK_M": 16, "TILES_M": tiles, "BLOCK_N": 32, "SLICES": warps,
        **blocks_in_flight(16, 32, warps, in_features, dtype), "num_warps": warps,
    }  # fmt: skip
