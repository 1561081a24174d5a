"""Triton kernel of the causal convolution's step: a few new tokens against a rolling state."""

from typing import Any

import torch
import triton
import triton.language as tl

from mamba_kernels.backend import interpreting
from mamba_kernels.causal_conv1d_triton import convolve, load_taps, pointers
from mamba_kernels.triton_math import logistic_quotient


@triton.jit(do_not_specialize=["d_blocks"])
def _update_kernel(
    x_ptr, state_ptr, weight_ptr, bias_ptr, cache_seqlens_ptr, indices_ptr, out_ptr,
    dim, seqlen, state_len, d_blocks,
    stride_xb, stride_xd, stride_xt, stride_sb, stride_sd, stride_sc, stride_ob, stride_od, stride_ot,
    WIDTH: tl.constexpr, SILU: tl.constexpr, HAS_BIAS: tl.constexpr, RING: tl.constexpr,
    HAS_INDICES: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Program (batch, d_block), d_block fastest: BLOCK_D channels, all state_len <= BLOCK_S columns.

    The state is read in whole before any of it is written: columns move between threads.
    """
    pid = tl.program_id(0)
    d_block = pid % d_blocks
    b = (pid // d_blocks).to(tl.int64)

    d = d_block * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = d < dim
    channel = d.to(tl.int64)
    slot = b + tl.zeros_like(channel)
    if HAS_INDICES:
        slot = tl.load(indices_ptr + slot).to(tl.int64)
    live = slot >= 0
    x = x_ptr + b * stride_xb + channel * stride_xd
    out = out_ptr + b * stride_ob + channel * stride_od
    state = state_ptr + slot * stride_sb + channel * stride_sd
    kept = inside & live

    # The newest tokens of the state lie before column `tip`: its end, or in a ring where x goes next.
    tip = state_len + tl.zeros((), tl.int32)
    if RING:
        tip = (tl.load(cache_seqlens_ptr + b) % state_len).to(tl.int32) + state_len
    p1 = tl.load(state + ((tip - 1) % state_len) * stride_sc, mask=kept, other=0.0).to(tl.float32)
    p2 = p1
    p3 = p1
    if WIDTH >= 3:
        p2 = tl.load(state + ((tip - 2) % state_len) * stride_sc, mask=kept, other=0.0).to(tl.float32)
    if WIDTH >= 4:
        p3 = tl.load(state + ((tip - 3) % state_len) * stride_sc, mask=kept, other=0.0).to(tl.float32)

    # Column c becomes token `token` of x where that is not negative. In a ring that is the last one put
    # there; otherwise the columns move down by seqlen.
    c = tl.arange(0, BLOCK_S)[None, :]
    cell = kept[:, None] & (c < state_len)
    if RING:
        first = (c - tip + 2 * state_len) % state_len
        token = tl.where(first < seqlen, first + (seqlen - 1 - first) // state_len * state_len, -1)
        cell = cell & (token >= 0)
    else:
        token = c + seqlen - state_len
        old = tl.load(state[:, None] + (c + seqlen) * stride_sc, mask=cell & (token < 0), other=0.0)
    cells = tl.load(x[:, None] + token * stride_xt, mask=cell & (token >= 0), other=0.0)
    cells = cells.to(state_ptr.dtype.element_ty)
    if not RING:
        cells = tl.where(token >= 0, cells, old)

    w0, w1, w2, w3 = load_taps(weight_ptr, d, dim, WIDTH)
    bias = 0.0
    if HAS_BIAS:
        bias = tl.load(bias_ptr + d, mask=inside, other=0.0).to(tl.float32)
    for _ in range(seqlen):
        x0 = tl.load(x, mask=kept, other=0.0).to(tl.float32)
        y = convolve(p3, p2, p1, x0, 0, 0, 0, 0, w0, w1, w2, w3, bias, WIDTH, False)
        if SILU:
            y = logistic_quotient(y, y, INTERPRET)
        tl.store(out, tl.where(live, y, 0.0), mask=inside)
        x += stride_xt
        out += stride_ot
        p3, p2, p1 = p2, p1, x0

    tl.debug_barrier()
    tl.store(state[:, None] + c * stride_sc, cells, mask=cell)


def config_for(batch: int, dim: int, state_len: int) -> dict[str, Any]:
    """Block sizes and num_warps: small blocks, so that a small batch still reaches every processor."""
    block_s = triton.next_power_of_2(state_len)
    block_d = 64 if batch * dim < 256 * 1024 else 256
    while block_d > 16 and block_d * block_s > 4096:
        block_d //= 2
    return {"BLOCK_S": block_s, "BLOCK_D": block_d, "num_warps": max(1, block_d // 64)}


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    conv_state_indices: torch.Tensor | None,
    silu: bool,
    config: dict[str, Any] | None = None,
) -> torch.Tensor:
    """Launch the step for x (batch, dim, seqlen); updates conv_state in place.

    Shapes as in the public causal_conv1d_update; the parameters and the index vectors are contiguous.
    """
    batch, dim, seqlen = x.shape
    state_len = conv_state.shape[-1]
    out = torch.empty_like(x)
    if config is None:
        config = config_for(batch, dim, state_len)
    d_blocks = triton.cdiv(dim, config["BLOCK_D"])
    with torch.cuda.device_of(x):
        _update_kernel[(batch * d_blocks,)](
            x, conv_state, weight, *pointers(x, bias, cache_seqlens, conv_state_indices), out,
            dim, seqlen, state_len, d_blocks,
            *x.stride(), *conv_state.stride(), *out.stride(),
            WIDTH=weight.shape[1], SILU=silu, HAS_BIAS=bias is not None, RING=cache_seqlens is not None,
            HAS_INDICES=conv_state_indices is not None, INTERPRET=interpreting(), **config,
        )  # fmt: skip
    return out
