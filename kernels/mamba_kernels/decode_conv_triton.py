"""The causal convolution of one token: as the end of in_proj, whose tile holds the newest inputs, or alone.

A channel belongs to one tile of in_proj's outputs, so the window that is read is moved on in place with no
other program looking, and the recurrence finds x, B and C ready.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from mamba_kernels.decode_norm_triton import late_start, start_next, wait_for_previous
from mamba_kernels.triton_math import silu


@triton.jit
def load_window(
    conv_state_ptr, slots_ptr, m, m_in, channel, is_conv,
    stride_slot, stride_channel, stride_tap, D_CONV: tl.constexpr,
):  # fmt: skip
    """The last D_CONV - 1 inputs of a tile (M, N) of channels, oldest first; the tile's pointers and mask.

    m: rows of the batch, whose slots of the state are slots[m], or m; a negative slot is padding.
    """
    slot = m.to(tl.int64)
    if slots_ptr is not None:
        slot = tl.load(slots_ptr + m, mask=m_in, other=-1).to(tl.int64)
    ptrs = conv_state_ptr + slot[:, None] * stride_slot + channel[None, :] * stride_channel
    mask = (m_in & (slot >= 0))[:, None] & is_conv[None, :]
    window = ()
    for tap in tl.static_range(1, D_CONV):
        window += (tl.load(ptrs + tap * stride_tap, mask=mask, other=0.0),)
    return window, ptrs, mask


@triton.jit
def load_taps(conv_weight_ptr, channel, is_conv, D_CONV: tl.constexpr):
    """The weights of channels (N,), one vector a tap, oldest first; conv_weight is (conv_dim, D_CONV)."""
    taps = ()
    for tap in tl.static_range(D_CONV):
        taps += (tl.load(conv_weight_ptr + channel * D_CONV + tap, mask=is_conv, other=0.0),)
    return taps


@triton.jit
def load_conv_bias(conv_bias_ptr, channel, is_conv):
    """The bias of channels (N,), zero where there is none."""
    if conv_bias_ptr is None:
        return tl.zeros(channel.shape, tl.float32)
    else:
        return tl.load(conv_bias_ptr + channel, mask=is_conv, other=0.0)


@triton.jit
def load_convolution(
    conv_state_ptr, conv_weight_ptr, conv_bias_ptr, slots_ptr, m, m_in, channel, is_conv,
    stride_slot, stride_channel, stride_tap, D_CONV: tl.constexpr,
):  # fmt: skip
    """What `convolve` needs of a tile (M, N) beside its newest inputs; no kernel of this token writes it."""
    taps = load_taps(conv_weight_ptr, channel, is_conv, D_CONV)
    window, ptrs, mask = load_window(
        conv_state_ptr, slots_ptr, m, m_in, channel, is_conv, stride_slot, stride_channel, stride_tap, D_CONV
    )
    return window, ptrs, mask, taps, load_conv_bias(conv_bias_ptr, channel, is_conv)


@triton.jit
def convolve(new, convolution, stride_tap, D_CONV: tl.constexpr):
    """Put the inputs `new` (M, N) into the convolution: move its window on, return silu(conv) (M, N)."""
    window, ptrs, mask, taps, conv_bias = convolution
    total = new * taps[D_CONV - 1].to(tl.float32)[None, :] + conv_bias.to(tl.float32)[None, :]
    for tap in tl.static_range(D_CONV - 1):
        total += window[tap].to(tl.float32) * taps[tap].to(tl.float32)[None, :]
    tl.debug_barrier()  # the loads of the window may belong to other threads than these stores
    for tap in tl.static_range(D_CONV - 1):
        tl.store(ptrs + tap * stride_tap, window[tap], mask=mask)
    tl.store(ptrs + (D_CONV - 1) * stride_tap, new.to(ptrs.dtype.element_ty), mask=mask)
    return silu(total)


@triton.jit
def convolve_in_place(
    x_ptr, convolution, m, m_in, channel, is_conv, stride_x, stride_tap, D_CONV: tl.constexpr
):  # fmt: skip
    """x = silu(conv(x)) of a tile (M, N) of channels; return it as it was written, zero outside."""
    ptrs = x_ptr + m.to(tl.int64)[:, None] * stride_x + channel[None, :]
    mask = m_in[:, None] & is_conv[None, :]
    new = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    y = convolve(new, convolution, stride_tap, D_CONV).to(x_ptr.dtype.element_ty)
    tl.store(ptrs, y, mask=mask)
    return y


@triton.jit
def convolve_tile(
    x_ptr, conv_state_ptr, conv_weight_ptr, conv_bias_ptr, slots_ptr, column, row,
    batch, width, stride_x, stride_slot, stride_channel, stride_tap,
    D_CONV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Convolve tile `column` of BLOCK_N of the first `width` channels, tile `row` of BLOCK_M rows of x."""
    channel = column * BLOCK_N + tl.arange(0, BLOCK_N)
    m = row * BLOCK_M + tl.arange(0, BLOCK_M)
    convolution = load_convolution(
        conv_state_ptr, conv_weight_ptr, conv_bias_ptr, slots_ptr, m, m < batch, channel, channel < width,
        stride_slot, stride_channel, stride_tap, D_CONV,
    )  # fmt: skip
    wait_for_previous(PDL)
    convolve_in_place(
        x_ptr, convolution, m, m < batch, channel, channel < width, stride_x, stride_tap, D_CONV
    )


@triton.jit(do_not_specialize=["batch"])
def _convolve_kernel(
    x_ptr, conv_state_ptr, conv_weight_ptr, conv_bias_ptr, slots_ptr,
    batch, conv_dim, stride_x, stride_slot, stride_channel, stride_tap,
    D_CONV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile of BLOCK_N channels, tile of BLOCK_M rows of the batch): x = silu(conv(x)), in place."""
    start_next(PDL)
    convolve_tile(
        x_ptr, conv_state_ptr, conv_weight_ptr, conv_bias_ptr, slots_ptr, tl.program_id(0), tl.program_id(1),
        batch, conv_dim, stride_x, stride_slot, stride_channel, stride_tap, D_CONV, BLOCK_M, BLOCK_N, PDL,
    )  # fmt: skip


# 8 channels of one row a thread: whole vectors, and nothing to keep in registers.
TILE = {"BLOCK_M": 4, "BLOCK_N": 256, "num_warps": 4}


class Convolution(NamedTuple):
    """Operands of the convolution of the columns first, first + 1, ... of a projection's output."""

    state: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    slots: torch.Tensor | None
    first: int

    def scalars(self) -> tuple[int, ...]:
        """The columns that are channels, begin and end, and the state's strides."""
        if self.state is None:
            return 0, 0, 0, 0, 0
        return self.first, self.first + self.state.shape[1], *self.state.stride()


def launch_convolve(out: torch.Tensor, conv: Convolution, pdl: bool) -> None:
    """Convolve the columns of `out` (batch, rows of in_proj) in place, behind a product that made it."""
    batch = out.shape[0]
    begin, end, *state_strides = conv.scalars()
    x = out[:, begin:end]
    with torch.cuda.device_of(out):
        _convolve_kernel[(triton.cdiv(end - begin, TILE["BLOCK_N"]), triton.cdiv(batch, TILE["BLOCK_M"]))](
            x, *conv[:4], batch, end - begin, x.stride(0), *state_strides,
            D_CONV=conv.state.shape[2], **TILE, **late_start(pdl, out),
        )  # fmt: skip
