"""Triton kernel of the decode step's projections on the tensor cores: from about 16 rows of the batch.

The weight streams through shared memory; its first blocks are asked into the cache before the kernel ahead
has ended.
"""

import triton
import triton.language as tl

from mamba_kernels.decode_conv_triton import convolve, load_conv_bias, load_taps, load_window
from mamba_kernels.decode_norm_triton import rstd, start_next, store_normed, wait_for_previous


@triton.jit
def _prefetch(ptrs):
    """Ask for the cache line of each pointer, without a register to wait for."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [ptrs], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _convolve_tile(
    out_ptr, conv_state_ptr, conv_weight_ptr, conv_bias_ptr, slots_ptr, first, batch,
    n, conv_begin, conv_end, stride_out, stride_slot, stride_channel, stride_tap,
    BLOCK_M: tl.constexpr, D_CONV: tl.constexpr,
):  # fmt: skip
    """Convolve a tile of out (rows from `first`, columns n) in place, 16 rows at a time.

    The tile is read back rather than kept, because the tensor cores leave it spread over the threads in a
    way that suits no other access.
    """
    channel = n - conv_begin
    is_conv = (n >= conv_begin) & (n < conv_end)
    taps = load_taps(conv_weight_ptr, channel, is_conv, D_CONV)
    conv_bias = load_conv_bias(conv_bias_ptr, channel, is_conv)
    tl.debug_barrier()  # every thread has stored its part of the tile
    for step in tl.static_range(BLOCK_M // 16):
        m = first + step * 16 + tl.arange(0, 16)
        m_in = m < batch
        window, ptrs, mask = load_window(
            conv_state_ptr, slots_ptr, m, m_in, channel, is_conv,
            stride_slot, stride_channel, stride_tap, D_CONV,
        )  # fmt: skip
        out_ptrs = out_ptr + m.to(tl.int64)[:, None] * stride_out + n[None, :]
        out_mask = m_in[:, None] & is_conv[None, :]
        new = tl.load(out_ptrs, mask=out_mask, other=0.0).to(tl.float32)
        activated = convolve(new, window, taps, conv_bias, ptrs, mask, stride_tap, D_CONV)
        tl.store(out_ptrs, activated.to(out_ptr.dtype.element_ty), mask=out_mask)


@triton.jit(do_not_specialize=["batch", "parts"])
def matmul_kernel(
    scaled_ptr, squares_ptr, weight_ptr, bias_ptr, out_ptr,
    conv_state_ptr, conv_weight_ptr, conv_bias_ptr, slots_ptr,
    residual_ptr, norm_weight_ptr, next_scaled_ptr, next_squares_ptr,
    batch, out_features, parts, eps, stride_scaled, stride_squares, stride_out,
    conv_begin, conv_end, stride_slot, stride_channel, stride_tap,
    stride_residual, stride_next_scaled, stride_next_squares, stride_split,
    K: tl.constexpr, GROUPS: tl.constexpr, EPILOGUE: tl.constexpr, D_CONV: tl.constexpr,
    SPLIT_K: tl.constexpr, SCALE_FIRST: tl.constexpr, INTERPRET: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_PARTS: tl.constexpr,
    PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile of BLOCK_N outputs, tile of BLOCK_M rows of the batch, split of K).

    PREFETCH cache lines of 64 weights a row are asked for before the kernel ahead has ended.
    SCALE_FIRST: the input is wider than the weight and is scaled before it is rounded to its type.
    """
    start_next(PDL)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_in = n < out_features
    rows = weight_ptr + n.to(tl.int64)[:, None] * K
    SPAN: tl.constexpr = (K + SPLIT_K * BLOCK_K - 1) // (SPLIT_K * BLOCK_K) * BLOCK_K
    begin = tl.program_id(2) * SPAN
    if PDL and PREFETCH > 0:
        line = begin + 64 * tl.arange(0, PREFETCH)
        _prefetch(rows + tl.minimum(line, K - 1)[None, :])
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_in = m < batch
    m64 = m.to(tl.int64)
    wait_for_previous(PDL)

    k = tl.arange(0, BLOCK_K)
    inputs = scaled_ptr + m64[:, None] * stride_scaled
    GROUP_K: tl.constexpr = K // GROUPS
    y = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for group in range(GROUPS):
        scale = tl.full((BLOCK_M,), 1.0, tl.float32)
        if SCALE_FIRST and squares_ptr is not None:
            scale = rstd(
                squares_ptr, stride_squares, m, m_in, group, parts, GROUP_K, eps, BLOCK_M, BLOCK_PARTS
            )
        end = tl.minimum((group + 1) * GROUP_K, begin + SPAN)
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k0 in range(group * GROUP_K + begin, end, BLOCK_K):
            w_mask = n_in[:, None]
            v_mask = m_in[:, None]
            if GROUP_K % BLOCK_K != 0:
                w_mask = w_mask & (k0 + k < end)[None, :]
                v_mask = v_mask & (k0 + k < end)[None, :]
            w = tl.load(rows + (k0 + k)[None, :], mask=w_mask, other=0.0)
            v = tl.load(inputs + (k0 + k)[None, :], mask=v_mask, other=0.0)
            if SCALE_FIRST:
                v = (v.to(tl.float32) * scale[:, None]).to(w.dtype)
            if INTERPRET:  # its dot multiplies the bits of bfloat16
                v = v.to(tl.float32)
                w = w.to(tl.float32)
            total = tl.dot(v, tl.trans(w), total, input_precision="ieee")
        if squares_ptr is not None and EPILOGUE != "partial" and not SCALE_FIRST:
            scale = rstd(
                squares_ptr, stride_squares, m, m_in, group, parts, GROUP_K, eps, BLOCK_M, BLOCK_PARTS
            )
            total *= scale[:, None]
        y += total
    if bias_ptr is not None and EPILOGUE != "partial":
        y += tl.load(bias_ptr + n, mask=n_in, other=0.0).to(tl.float32)[None, :]

    both_in = m_in[:, None] & n_in[None, :]
    if EPILOGUE == "residual":
        residual_ptrs = residual_ptr + m64[:, None] * stride_residual + n[None, :]
        y += tl.load(residual_ptrs, mask=both_in, other=0.0).to(tl.float32)
        x = y.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptrs, x, mask=both_in)
        norm_weight = tl.load(norm_weight_ptr + n, mask=n_in, other=0.0)
        store_normed(
            x.to(tl.float32), norm_weight, m, n, m_in, n_in, tl.program_id(0),
            next_scaled_ptr, stride_next_scaled, next_squares_ptr, stride_next_squares,
        )  # fmt: skip
    else:
        split = tl.program_id(2).to(tl.int64)
        out_ptrs = out_ptr + split * stride_split + m64[:, None] * stride_out + n[None, :]
        tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=both_in)
        if EPILOGUE == "conv":
            begin_n = tl.program_id(0) * BLOCK_N
            if (begin_n < conv_end) & (begin_n + BLOCK_N > conv_begin):
                _convolve_tile(
                    out_ptr, conv_state_ptr, conv_weight_ptr, conv_bias_ptr, slots_ptr,
                    tl.program_id(1) * BLOCK_M, batch, n, conv_begin, conv_end,
                    stride_out, stride_slot, stride_channel, stride_tap, BLOCK_M, D_CONV,
                )  # fmt: skip
