"""Triton kernel of the causal depthwise convolution, backward, for channel-last tensors.

With p = the convolution before its activation and g = dout * activation'(p), row t:

    dx[s]             = sum over k of w[WIDTH - 1 - k] * g[s + k]
    dw[WIDTH - 1 - k] = sum over s of x[s] * g[s + k]          db = sum over t of g[t]

where s runs from -(WIDTH - 1), the rows of the initial states, and s, s + k are of one packed sequence.
Each program sums its own part of dw and db; torch adds the parts in a fixed order, so that the result is
the same in every run.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from mamba_kernels.backend import interpreting
from mamba_kernels.causal_conv1d_triton import (
    convolve,
    load_row,
    load_sequence,
    load_taps,
    pointers,
    strides_of,
)
from mamba_kernels.triton_launch import stride_unit
from mamba_kernels.triton_math import sigmoid


@triton.jit(do_not_specialize=["seqlen", "t_blocks", "d_blocks"])
def _backward_kernel(
    x_ptr, weight_ptr, bias_ptr, seq_idx_ptr, initial_ptr, dout_ptr, dfinal_ptr,
    dx_ptr, dinitial_ptr, parts_ptr,
    dim, seqlen, t_blocks, d_blocks,
    stride_xb, stride_xd, stride_xt, stride_ib, stride_id, stride_it,
    stride_gb, stride_gd, stride_gt, stride_fb, stride_fd, stride_ft,
    stride_dxb, stride_dxd, stride_dxt, stride_dib, stride_did, stride_dit,
    WIDTH: tl.constexpr, SILU: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SEQ_IDX: tl.constexpr,
    HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr,
    RUNS: tl.constexpr, STEPS: tl.constexpr, BLOCK_D: tl.constexpr, UNIT: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """Program (batch, t_block, d_block), d_block fastest: RUNS runs of STEPS tokens, BLOCK_D channels.

    As forward, a tile (RUNS, BLOCK_D) walks down the tokens; row s is finished when g[s + WIDTH - 1] is
    known, so a run goes WIDTH - 1 tokens past its end. The run of token 0 also finishes rows s < 0. x's
    strides of batch and token come in UNIT elements (see stride_unit).
    """
    stride_xb = tl.cast(stride_xb, tl.int64) * UNIT
    stride_xt = tl.cast(stride_xt, tl.int64) * UNIT
    pid = tl.program_id(0)
    d_block = pid % d_blocks
    block = pid // d_blocks  # of (batch, t_block)
    t_block = block % t_blocks
    b = (block // t_blocks).to(tl.int64)

    d = d_block * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = (d < dim)[None, :]
    channel = d[None, :].to(tl.int64)
    x = x_ptr + b * stride_xb + channel * stride_xd
    initial = initial_ptr + b * stride_ib + channel * stride_id
    seq_idx = seq_idx_ptr + b * seqlen
    w0, w1, w2, w3 = load_taps(weight_ptr, d, dim, WIDTH)
    w0, w1, w2, w3 = w0[None, :], w1[None, :], w2[None, :], w3[None, :]
    bias = 0.0
    if HAS_BIAS:
        bias = tl.load(bias_ptr + d, mask=d < dim, other=0.0).to(tl.float32)[None, :]

    start = (t_block * RUNS + tl.arange(0, RUNS)[:, None]) * STEPS
    end = tl.minimum(start + STEPS, seqlen)  # of the rows that this run finishes
    stop = tl.minimum(end + WIDTH - 1, seqlen)  # of the rows of g that it needs for that
    first = tl.where(start > 0, start, 1 - WIDTH)
    x_next = x + start.to(tl.int64) * stride_xt
    g_next = dout_ptr + b * stride_gb + channel * stride_gd + start.to(tl.int64) * stride_gt
    n0 = tl.load(x_next, mask=inside & (start < stop), other=0.0)
    n1 = tl.load(x_next + stride_xt, mask=inside & (start + 1 < stop), other=0.0)
    m0 = tl.load(g_next, mask=inside & (start < stop), other=0.0)
    m1 = tl.load(g_next + stride_gt, mask=inside & (start + 1 < stop), other=0.0)

    some = inside & (start < seqlen)
    x1 = load_row(x, stride_xt, initial, stride_it, start - 1, some, WIDTH, HAS_INITIAL)
    x2 = x1
    x3 = x1
    if WIDTH >= 3:
        x2 = load_row(x, stride_xt, initial, stride_it, start - 2, some, WIDTH, HAS_INITIAL)
    if WIDTH >= 4:
        x3 = load_row(x, stride_xt, initial, stride_it, start - 3, some, WIDTH, HAS_INITIAL)
    s1 = load_sequence(seq_idx, start - 1, seqlen, HAS_SEQ_IDX)
    s2 = load_sequence(seq_idx, start - 2, seqlen, HAS_SEQ_IDX)
    s3 = load_sequence(seq_idx, start - 3, seqlen, HAS_SEQ_IDX)
    if HAS_SEQ_IDX:
        last = tl.load(seq_idx + (seqlen - 1))

    # Zeros for each: names that share their first value stay one value in the loop (Triton 3.6).
    g1 = tl.zeros((RUNS, BLOCK_D), tl.float32)
    g2 = tl.zeros((RUNS, BLOCK_D), tl.float32)
    g3 = tl.zeros((RUNS, BLOCK_D), tl.float32)
    dw0 = tl.zeros((RUNS, BLOCK_D), tl.float32)
    dw1 = tl.zeros((RUNS, BLOCK_D), tl.float32)
    dw2 = tl.zeros((RUNS, BLOCK_D), tl.float32)
    dw3 = tl.zeros((RUNS, BLOCK_D), tl.float32)
    dbias = tl.zeros((RUNS, BLOCK_D), tl.float32)
    dx = dx_ptr + b * stride_dxb + channel * stride_dxd + (start.to(tl.int64) - (WIDTH - 1)) * stride_dxt
    for i in tl.range(0, STEPS + WIDTH - 1, loop_unroll_factor=2):
        t = start + i
        x0 = n0.to(tl.float32)
        g0 = m0.to(tl.float32)
        n0, m0 = n1, m1
        x_next += stride_xt
        g_next += stride_gt
        n1 = tl.load(x_next + stride_xt, mask=inside & (t + 2 < stop), other=0.0)
        m1 = tl.load(g_next + stride_gt, mask=inside & (t + 2 < stop), other=0.0)
        s0 = load_sequence(seq_idx, t, seqlen, HAS_SEQ_IDX)
        if SILU:
            p = convolve(x3, x2, x1, x0, s3, s2, s1, s0, w0, w1, w2, w3, bias, WIDTH, HAS_SEQ_IDX)
            sigma = sigmoid(p, INTERPRET)
            g0 *= sigma * (1.0 + p * (1.0 - sigma))
        if HAS_SEQ_IDX:
            g0 = tl.where(s0 >= 0, g0, 0.0)

        # Row s is the oldest one in hand; a_k is g[s + k], r_k its sequence.
        s = t - (WIDTH - 1)
        owned = inside & (s >= first) & (s < end)
        if WIDTH == 4:
            xs, a0, a1, a2, a3 = x3, g3, g2, g1, g0
            r0, r1, r2, r3 = s3, s2, s1, s0
        elif WIDTH == 3:
            xs, a0, a1, a2, a3 = x2, g2, g1, g0, g0
            r0, r1, r2, r3 = s2, s1, s0, s0
        else:
            xs, a0, a1, a2, a3 = x1, g1, g0, g0, g0
            r0, r1, r2, r3 = s1, s0, s0, s0
        if HAS_SEQ_IDX:
            a1 = tl.where(r1 == r0, a1, 0.0)
            a2 = tl.where(r2 == r0, a2, 0.0)
            a3 = tl.where(r3 == r0, a3, 0.0)
        xs = tl.where(owned, xs, 0.0)
        dw3 += xs * a0
        dw2 += xs * a1
        if WIDTH >= 3:
            dw1 += xs * a2
        if WIDTH >= 4:
            dw0 += xs * a3
        if HAS_BIAS:
            dbias += tl.where(owned, a0, 0.0)

        ds = convolve(a3, a2, a1, a0, r3, r2, r1, r0, w0, w1, w2, w3, 0.0, WIDTH, False)
        if HAS_FINAL:
            column = (s - seqlen + WIDTH - 1).to(tl.int64)
            returned = owned & (column >= 0)
            if HAS_SEQ_IDX:
                returned = returned & (r0 == last) & (r0 >= 0)
            dfinal = dfinal_ptr + b * stride_fb + channel * stride_fd + column * stride_ft
            ds += tl.load(dfinal, mask=returned, other=0.0).to(tl.float32)
        tl.store(dx, ds, mask=owned & (s >= 0))
        if HAS_INITIAL:
            column = (s + WIDTH - 1).to(tl.int64)
            dinitial = dinitial_ptr + b * stride_dib + channel * stride_did + column * stride_dit
            tl.store(dinitial, ds, mask=owned & (s < 0))
        dx += stride_dxt
        x3, x2, x1 = x2, x1, x0
        g3, g2, g1 = g2, g1, g0
        s3, s2, s1 = s2, s1, s0

    parts = parts_ptr + block.to(tl.int64) * (WIDTH + 1) * dim + d
    tl.store(parts + WIDTH * dim, tl.sum(dbias, axis=0), mask=d < dim)
    tl.store(parts + (WIDTH - 1) * dim, tl.sum(dw3, axis=0), mask=d < dim)
    tl.store(parts + (WIDTH - 2) * dim, tl.sum(dw2, axis=0), mask=d < dim)
    if WIDTH >= 3:
        tl.store(parts + (WIDTH - 3) * dim, tl.sum(dw1, axis=0), mask=d < dim)
    if WIDTH >= 4:
        tl.store(parts, tl.sum(dw0, axis=0), mask=d < dim)


def config_for(batch: int, dim: int, seqlen: int) -> dict[str, Any]:
    """Block sizes and num_warps: 4 channels a thread (the sums of dw fill the registers), one run a warp."""
    block_d = min(128, max(16, triton.next_power_of_2(dim)))
    runs, steps = 4, 128
    while steps > 8 and batch * triton.cdiv(seqlen, runs * steps) * triton.cdiv(dim, block_d) < 1024:
        steps //= 2
    return {"RUNS": runs, "STEPS": steps, "BLOCK_D": block_d, "num_warps": 4}


def causal_conv1d_bwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    dout: torch.Tensor,
    dfinal_states: torch.Tensor | None,
    silu: bool,
    config: dict[str, Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Launch the kernel; returns (dx, dweight, dbias, dinitial_states), each of its input's dtype.

    Shapes as in causal_conv1d_fn; weight, bias and seq_idx are contiguous. A channel-first x or dout is
    copied to channel-last, and dx is always channel-last.
    """
    batch, dim, seqlen = x.shape
    width = weight.shape[1]
    x, dout = _channel_last(x), _channel_last(dout)
    dx = torch.empty_like(x)
    dinitial = None if initial_states is None else torch.empty_like(initial_states)
    if config is None:
        config = config_for(batch, dim, seqlen)
    t_blocks = triton.cdiv(seqlen, config["RUNS"] * config["STEPS"])
    d_blocks = triton.cdiv(dim, config["BLOCK_D"])
    unit = stride_unit(x.stride(0), x.stride(2))
    parts = torch.empty(batch * t_blocks, width + 1, dim, device=x.device, dtype=torch.float32)
    with torch.cuda.device_of(x):
        _backward_kernel[(batch * t_blocks * d_blocks,)](
            x, weight, *pointers(x, bias, seq_idx, initial_states), dout, *pointers(x, dfinal_states),
            dx, *pointers(x, dinitial), parts,
            dim, seqlen, t_blocks, d_blocks,
            x.stride(0) // unit, x.stride(1), x.stride(2) // unit,
            *strides_of(initial_states), *dout.stride(), *strides_of(dfinal_states),
            *dx.stride(), *strides_of(dinitial),
            WIDTH=width, SILU=silu, HAS_BIAS=bias is not None, HAS_SEQ_IDX=seq_idx is not None,
            HAS_INITIAL=initial_states is not None, HAS_FINAL=dfinal_states is not None,
            UNIT=unit, INTERPRET=interpreting(), **config,
        )  # fmt: skip
    total = parts.sum(0)
    dweight = total[:width].t().to(weight.dtype)
    dbias = None if bias is None else total[width].to(bias.dtype)
    return dx, dweight, dbias, dinitial


def _channel_last(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.stride(1) <= tensor.stride(2):
        return tensor
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)
