"""The causal convolution of one token, as the end of in_proj: its tile holds the newest inputs.

A channel belongs to one tile of in_proj's outputs, so the window that is read is moved on in place with no
other program looking, and the recurrence finds x, B and C ready.
"""

import triton
import triton.language as tl

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
def convolve(new, window, taps, conv_bias, ptrs, mask, stride_tap, D_CONV: tl.constexpr):
    """Put the inputs `new` (M, N) into the convolution: move its window on, return silu(conv) (M, N)."""
    total = new * taps[D_CONV - 1].to(tl.float32)[None, :] + conv_bias.to(tl.float32)[None, :]
    for tap in tl.static_range(D_CONV - 1):
        total += window[tap].to(tl.float32) * taps[tap].to(tl.float32)[None, :]
    tl.debug_barrier()  # the loads of the window may belong to other threads than these stores
    for tap in tl.static_range(D_CONV - 1):
        tl.store(ptrs + tap * stride_tap, window[tap], mask=mask)
    tl.store(ptrs + (D_CONV - 1) * stride_tap, new.to(ptrs.dtype.element_ty), mask=mask)
    return silu(total)
