"""What the decode step's projections do with their products, y = normalised @ weight.T (+ bias).

    "store"     out = y
    "conv"      the same, but the columns of x, B and C first go through the causal convolution and SiLU
    "residual"  residual += y, and the next `Normed` is made of it

In three pieces: what may be loaded ahead of `wait_for_previous`, what follows it, and the end. A tile is
(M, N): rows m of the batch, columns n.
"""

import triton
import triton.language as tl

from mamba_kernels.decode_conv_triton import convolve, load_convolution
from mamba_kernels.decode_norm_triton import store_normed


@triton.jit
def load_early(
    bias_ptr, conv_state_ptr, conv_weight_ptr, conv_bias_ptr, slots_ptr, norm_weight_ptr,
    m, m_in, n, n_in, conv_begin, conv_end, stride_slot, stride_channel, stride_tap,
    D_CONV: tl.constexpr, EPILOGUE: tl.constexpr,
):  # fmt: skip
    """The bias and what else no kernel of this token writes before, for `finish`."""
    bias = tl.zeros(n.shape, tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + n, mask=n_in, other=0.0)
    if EPILOGUE == "conv":
        channel = n - conv_begin
        is_conv = (n >= conv_begin) & (n < conv_end)
        convolution = load_convolution(
            conv_state_ptr, conv_weight_ptr, conv_bias_ptr, slots_ptr, m, m_in, channel, is_conv,
            stride_slot, stride_channel, stride_tap, D_CONV,
        )  # fmt: skip
        return bias, is_conv, convolution
    elif EPILOGUE == "residual":
        return bias, tl.load(norm_weight_ptr + n, mask=n_in, other=0.0)
    else:
        return (bias,)


@triton.jit
def load_residual(residual_ptr, m, m_in, n, n_in, stride_residual, EPILOGUE: tl.constexpr):
    """The residual's tile in float32, which the kernel before may have written; zero without one."""
    if EPILOGUE == "residual":
        ptrs = residual_ptr + m.to(tl.int64)[:, None] * stride_residual + n[None, :]
        return tl.load(ptrs, mask=m_in[:, None] & n_in[None, :], other=0.0).to(tl.float32)
    else:
        return 0.0


@triton.jit
def finish(
    y, early, residual, out_ptr, stride_out, residual_ptr, stride_residual, m, m_in, n, n_in, tile,
    next_scaled_ptr, stride_next_scaled, next_squares_ptr, stride_next_squares, stride_tap,
    D_CONV: tl.constexpr, EPILOGUE: tl.constexpr,
):  # fmt: skip
    """Write products y (M, N), float32; tile: the part of the squares that these columns fill."""
    y += early[0].to(tl.float32)[None, :]
    both_in = m_in[:, None] & n_in[None, :]
    if EPILOGUE == "residual":
        x = (y + residual).to(residual_ptr.dtype.element_ty)
        ptrs = residual_ptr + m.to(tl.int64)[:, None] * stride_residual + n[None, :]
        tl.store(ptrs, x, mask=both_in)
        store_normed(
            x.to(tl.float32), early[1], m, n, m_in, n_in, tile,
            next_scaled_ptr, stride_next_scaled, next_squares_ptr, stride_next_squares,
        )  # fmt: skip
    else:
        if EPILOGUE == "conv":
            _, is_conv, convolution = early
            y = tl.where(is_conv[None, :], convolve(y, convolution, stride_tap, D_CONV), y)
        ptrs = out_ptr + m.to(tl.int64)[:, None] * stride_out + n[None, :]
        tl.store(ptrs, y.to(out_ptr.dtype.element_ty), mask=both_in)
