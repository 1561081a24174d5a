"""Triton kernels of the causal depthwise convolution over whole sequences, forward.

Two memory layouts, two kernels. Channel-last (what the model uses: x is a slice of in_proj's output)
walks down the sequence with the last WIDTH - 1 tokens in registers; channel-first gives a thread runs of 8
tokens. Either way each element of x is read from memory once, in whole vectors.

Row t < 0 means column WIDTH - 1 + t of the initial states (zero where there are none). It belongs to the
same packed sequence as token 0. Strides are in elements, int64 wherever a product can pass 2^31.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from mamba_kernels.backend import interpreting
from mamba_kernels.triton_launch import PROCESSORS, stride_unit
from mamba_kernels.triton_math import logistic_quotient


@triton.jit
def load_taps(weight_ptr, d, dim, WIDTH: tl.constexpr):
    """The weights (dim, WIDTH), contiguous, of channels d as 4 vectors (BLOCK_D,), the last one for the
    token itself; the first 4 - WIDTH are zero.

    One load of whole rows and a sum within the thread: a strided load for each tap would cost more L1
    traffic than x itself.
    """
    column = tl.arange(0, 4)[None, :]
    tap = column - (4 - WIDTH)
    mask = d[:, None] < dim
    if WIDTH < 4:
        mask = mask & (tap >= 0)
    w = tl.load(weight_ptr + (d[:, None] * WIDTH + tap), mask=mask, other=0.0).to(tl.float32)
    w0 = tl.sum(tl.where(column == 0, w, 0.0), axis=1)
    w1 = tl.sum(tl.where(column == 1, w, 0.0), axis=1)
    w2 = tl.sum(tl.where(column == 2, w, 0.0), axis=1)
    w3 = tl.sum(tl.where(column == 3, w, 0.0), axis=1)
    return w0, w1, w2, w3


@triton.jit
def load_row(x, stride_xt, initial, stride_it, t, mask, WIDTH: tl.constexpr, HAS_INITIAL: tl.constexpr):
    """Row t of x, or of the initial states where t < 0. x, initial: pointers to the channels' row 0."""
    t = t.to(tl.int64)
    row = tl.load(x + t * stride_xt, mask=mask & (t >= 0), other=0.0).to(tl.float32)
    if HAS_INITIAL:
        before = mask & (t < 0) & (t >= 1 - WIDTH)
        row += tl.load(initial + (t + WIDTH - 1) * stride_it, mask=before, other=0.0).to(tl.float32)
    return row


@triton.jit
def load_sequence(seq_idx, t, seqlen, HAS_SEQ_IDX: tl.constexpr):
    """Which packed sequence token t belongs to; negative for padding and past the end."""
    if HAS_SEQ_IDX:
        return tl.load(seq_idx + tl.maximum(t, 0), mask=t < seqlen, other=-1)
    else:
        return t


@triton.jit
def convolve(
    x3, x2, x1, x0, s3, s2, s1, s0, w0, w1, w2, w3, bias, WIDTH: tl.constexpr, HAS_SEQ_IDX: tl.constexpr
):
    """bias + sum over k of w[WIDTH - 1 - k] * x_k, where x_k is the token k back and s_k its sequence."""
    if HAS_SEQ_IDX:
        x1 = tl.where(s1 == s0, x1, 0.0)
        x2 = tl.where(s2 == s0, x2, 0.0)
        x3 = tl.where(s3 == s0, x3, 0.0)
    y = bias + w3 * x0 + w2 * x1
    if WIDTH >= 3:
        y += w1 * x2
    if WIDTH >= 4:
        y += w0 * x3
    return y


@triton.jit
def _activate(y, s0, SILU: tl.constexpr, HAS_SEQ_IDX: tl.constexpr, INTERPRET: tl.constexpr):
    if SILU:
        y = logistic_quotient(y, y, INTERPRET)
    if HAS_SEQ_IDX:
        y = tl.where(s0 >= 0, y, 0.0)
    return y


@triton.jit
def _store_final_states(
    x, stride_xt, initial, stride_it, seq_idx, final, stride_ft, seqlen, mask,
    WIDTH: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_SEQ_IDX: tl.constexpr,
):  # fmt: skip
    """Write the last WIDTH - 1 rows, zero where they are not of the last token's sequence.

    x, initial, final: pointers (1, BLOCK_D) to the channels' row 0; mask (1, BLOCK_D).
    """
    column = tl.arange(0, 4)[:, None]
    t = seqlen - (WIDTH - 1) + column
    mask = mask & (column < WIDTH - 1)
    wanted = mask
    if HAS_SEQ_IDX:
        last = tl.load(seq_idx + (seqlen - 1))
        owner = load_sequence(seq_idx, t, seqlen, True)
        wanted = mask & (owner == last) & (owner >= 0)
    rows = load_row(x, stride_xt, initial, stride_it, t, wanted, WIDTH, HAS_INITIAL)
    tl.store(final + column.to(tl.int64) * stride_ft, rows, mask=mask)


@triton.jit(do_not_specialize=["seqlen", "t_blocks", "d_blocks"])
def _channel_last_kernel(
    x_ptr, weight_ptr, bias_ptr, seq_idx_ptr, initial_ptr, out_ptr, final_ptr,
    dim, seqlen, t_blocks, d_blocks,
    stride_xb, stride_xd, stride_xt, stride_ib, stride_id, stride_it,
    stride_ob, stride_od, stride_ot, stride_fb, stride_fd, stride_ft,
    WIDTH: tl.constexpr, SILU: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SEQ_IDX: tl.constexpr,
    HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr,
    RUNS: tl.constexpr, STEPS: tl.constexpr, BLOCK_D: tl.constexpr, UNIT: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """Program (batch, t_block, d_block), d_block fastest: RUNS runs of STEPS tokens, BLOCK_D channels.

    A tile (RUNS, BLOCK_D) holds one token of each run, so that a thread keeps its channels for the whole
    run. The next 4 tokens are always on their way: with 8 bf16 channels a thread that is 64 bytes a
    thread in flight, which is what hides the latency of memory. x's strides of batch and token come in
    UNIT elements (see stride_unit).
    """
    stride_xb = tl.cast(stride_xb, tl.int64) * UNIT
    stride_xt = tl.cast(stride_xt, tl.int64) * UNIT
    pid = tl.program_id(0)
    d_block = pid % d_blocks
    t_block = (pid // d_blocks) % t_blocks
    b = (pid // d_blocks // t_blocks).to(tl.int64)

    d = d_block * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = (d < dim)[None, :]
    channel = d[None, :].to(tl.int64)
    x = x_ptr + b * stride_xb + channel * stride_xd
    initial = initial_ptr + b * stride_ib + channel * stride_id
    seq_idx = seq_idx_ptr + b * seqlen

    start = (t_block * RUNS + tl.arange(0, RUNS)[:, None]) * STEPS
    end = tl.minimum(start + STEPS, seqlen)
    some = inside & (start < seqlen)
    x_next = x + start.to(tl.int64) * stride_xt
    n0 = tl.load(x_next, mask=some, other=0.0)
    x_next += stride_xt
    n1 = tl.load(x_next, mask=inside & (start + 1 < end), other=0.0)
    x_next += stride_xt
    n2 = tl.load(x_next, mask=inside & (start + 2 < end), other=0.0)
    x_next += stride_xt
    n3 = tl.load(x_next, mask=inside & (start + 3 < end), other=0.0)
    x_next += stride_xt

    p1 = load_row(x, stride_xt, initial, stride_it, start - 1, some, WIDTH, HAS_INITIAL)
    p2 = p1
    p3 = p1
    if WIDTH >= 3:
        p2 = load_row(x, stride_xt, initial, stride_it, start - 2, some, WIDTH, HAS_INITIAL)
    if WIDTH >= 4:
        p3 = load_row(x, stride_xt, initial, stride_it, start - 3, some, WIDTH, HAS_INITIAL)
    s1 = load_sequence(seq_idx, start - 1, seqlen, HAS_SEQ_IDX)
    s2 = load_sequence(seq_idx, start - 2, seqlen, HAS_SEQ_IDX)
    s3 = load_sequence(seq_idx, start - 3, seqlen, HAS_SEQ_IDX)

    w0, w1, w2, w3 = load_taps(weight_ptr, d, dim, WIDTH)
    w0, w1, w2, w3 = w0[None, :], w1[None, :], w2[None, :], w3[None, :]
    bias = 0.0
    if HAS_BIAS:
        bias = tl.load(bias_ptr + d, mask=d < dim, other=0.0).to(tl.float32)[None, :]

    out = out_ptr + b * stride_ob + channel * stride_od + start.to(tl.int64) * stride_ot
    for i in tl.range(0, STEPS, loop_unroll_factor=4):
        t = start + i
        x0 = n0.to(tl.float32)
        n0, n1, n2 = n1, n2, n3
        n3 = tl.load(x_next, mask=inside & (t + 4 < end), other=0.0)
        x_next += stride_xt
        s0 = load_sequence(seq_idx, t, seqlen, HAS_SEQ_IDX)
        y = convolve(p3, p2, p1, x0, s3, s2, s1, s0, w0, w1, w2, w3, bias, WIDTH, HAS_SEQ_IDX)
        tl.store(out, _activate(y, s0, SILU, HAS_SEQ_IDX, INTERPRET), mask=inside & (t < end))
        out += stride_ot
        p3, p2, p1 = p2, p1, x0
        s3, s2, s1 = s2, s1, s0

    if HAS_FINAL:
        if t_block == t_blocks - 1:
            final = final_ptr + b * stride_fb + channel * stride_fd
            _store_final_states(
                x, stride_xt, initial, stride_it, seq_idx, final, stride_ft, seqlen, inside,
                WIDTH, HAS_INITIAL, HAS_SEQ_IDX,
            )  # fmt: skip


@triton.jit
def _eighths(x):
    """The 8 tensors x[..., j] of x (rows, columns, 8), which a thread holds side by side: no data moves."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], 2, 2, 2)))
    x04, x26 = tl.split(even)
    x15, x37 = tl.split(odd)
    x0, x4 = tl.split(x04)
    x2, x6 = tl.split(x26)
    x1, x5 = tl.split(x15)
    x3, x7 = tl.split(x37)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def _join_eighths(x0, x1, x2, x3, x4, x5, x6, x7):
    even = tl.join(tl.join(x0, x4), tl.join(x2, x6))
    odd = tl.join(tl.join(x1, x5), tl.join(x3, x7))
    return tl.reshape(tl.join(even, odd), (x0.shape[0], x0.shape[1], 8))


@triton.jit(do_not_specialize=["t_blocks", "d_blocks"])
def _channel_first_kernel(
    x_ptr, weight_ptr, bias_ptr, seq_idx_ptr, initial_ptr, out_ptr, final_ptr,
    dim, seqlen, t_blocks, d_blocks,
    stride_xb, stride_xd, stride_xt, stride_ib, stride_id, stride_it,
    stride_ob, stride_od, stride_ot, stride_fb, stride_fd, stride_ft,
    WIDTH: tl.constexpr, SILU: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SEQ_IDX: tl.constexpr,
    HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Program (batch, d_block, t_block), t_block fastest: a tile (BLOCK_D, BLOCK_T / 8, 8).

    A thread holds runs of 8 tokens, and loads the 8 before them too: both loads are whole vectors, where
    loads shifted by one token could not be.
    """
    pid = tl.program_id(0)
    t_block = pid % t_blocks
    d_block = (pid // t_blocks) % d_blocks
    b = (pid // t_blocks // d_blocks).to(tl.int64)

    d = d_block * BLOCK_D + tl.arange(0, BLOCK_D)
    run = t_block * BLOCK_T + tl.arange(0, BLOCK_T // 8)[:, None] * 8
    t = (run + tl.arange(0, 8)[None, :])[None, :, :]
    channel = d[:, None, None].to(tl.int64)
    x = x_ptr + b * stride_xb + channel * stride_xd
    initial = initial_ptr + b * stride_ib + channel * stride_id
    seq_idx = seq_idx_ptr + b * seqlen
    inside = (d < dim)[:, None, None]

    now = load_row(x, stride_xt, initial, stride_it, t, inside & (t < seqlen), WIDTH, False)
    before = load_row(x, stride_xt, initial, stride_it, t - 8, inside & (t - 8 < seqlen), WIDTH, HAS_INITIAL)
    owner = load_sequence(seq_idx, t, seqlen, HAS_SEQ_IDX)
    x0, x1, x2, x3, x4, x5, x6, x7 = _eighths(now)
    s0, s1, s2, s3, s4, s5, s6, s7 = _eighths(owner)
    _, _, _, _, _, p3, p2, p1 = _eighths(before)
    _, _, _, _, _, q3, q2, q1 = _eighths(load_sequence(seq_idx, t - 8, seqlen, HAS_SEQ_IDX))

    w0, w1, w2, w3 = load_taps(weight_ptr, d, dim, WIDTH)
    w0, w1, w2, w3 = w0[:, None], w1[:, None], w2[:, None], w3[:, None]
    bias = 0.0
    if HAS_BIAS:
        bias = tl.load(bias_ptr + d, mask=d < dim, other=0.0).to(tl.float32)[:, None]

    y0 = convolve(p3, p2, p1, x0, q3, q2, q1, s0, w0, w1, w2, w3, bias, WIDTH, HAS_SEQ_IDX)
    y1 = convolve(p2, p1, x0, x1, q2, q1, s0, s1, w0, w1, w2, w3, bias, WIDTH, HAS_SEQ_IDX)
    y2 = convolve(p1, x0, x1, x2, q1, s0, s1, s2, w0, w1, w2, w3, bias, WIDTH, HAS_SEQ_IDX)
    y3 = convolve(x0, x1, x2, x3, s0, s1, s2, s3, w0, w1, w2, w3, bias, WIDTH, HAS_SEQ_IDX)
    y4 = convolve(x1, x2, x3, x4, s1, s2, s3, s4, w0, w1, w2, w3, bias, WIDTH, HAS_SEQ_IDX)
    y5 = convolve(x2, x3, x4, x5, s2, s3, s4, s5, w0, w1, w2, w3, bias, WIDTH, HAS_SEQ_IDX)
    y6 = convolve(x3, x4, x5, x6, s3, s4, s5, s6, w0, w1, w2, w3, bias, WIDTH, HAS_SEQ_IDX)
    y7 = convolve(x4, x5, x6, x7, s4, s5, s6, s7, w0, w1, w2, w3, bias, WIDTH, HAS_SEQ_IDX)
    y = _activate(_join_eighths(y0, y1, y2, y3, y4, y5, y6, y7), owner, SILU, HAS_SEQ_IDX, INTERPRET)
    out = out_ptr + b * stride_ob + channel * stride_od + t.to(tl.int64) * stride_ot
    tl.store(out, y, mask=inside & (t < seqlen))

    if HAS_FINAL:
        if t_block == t_blocks - 1:
            lane = d[None, :].to(tl.int64)
            _store_final_states(
                x_ptr + b * stride_xb + lane * stride_xd, stride_xt,
                initial_ptr + b * stride_ib + lane * stride_id, stride_it,
                seq_idx, final_ptr + b * stride_fb + lane * stride_fd, stride_ft,
                seqlen, lane < dim, WIDTH, HAS_INITIAL, HAS_SEQ_IDX,
            )  # fmt: skip


# Programs of the channel-last kernel that run at once: their registers leave room for 4 on a processor.
AT_ONCE = 4 * PROCESSORS


def config_for(channel_last: bool, batch: int, dim: int, seqlen: int, dtype: torch.dtype) -> dict[str, Any]:
    """Block sizes and num_warps of the forward kernel for a shape.

    Channel-last: 16 bytes of channels a thread, one run of tokens a warp, and runs as short as lets all
    programs run at once, or in as few full rounds as keep runs below 129 tokens. Channel-first: 16 tokens a
    thread, of one channel as far as they go.
    """
    if not channel_last:
        block_t = min(256, max(16, triton.next_power_of_2(seqlen)))
        return {"BLOCK_T": block_t, "BLOCK_D": 2048 // block_t, "num_warps": 4}
    block_d = min(512 // dtype.itemsize, max(16, triton.next_power_of_2(dim)))
    runs, columns = 4, batch * triton.cdiv(dim, block_d)
    rounds = max(1, triton.cdiv(columns * triton.cdiv(seqlen, runs * 128), AT_ONCE))
    steps = triton.cdiv(seqlen, runs * max(1, rounds * AT_ONCE // columns))
    return {"RUNS": runs, "STEPS": max(4, triton.cdiv(steps, 4) * 4), "BLOCK_D": block_d, "num_warps": 4}


def causal_conv1d_fwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    seq_idx: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    final_states: torch.Tensor | None,
    silu: bool,
    config: dict[str, Any] | None = None,
) -> torch.Tensor:
    """Launch the kernel of x's layout; returns the output in that layout, and fills `final_states`.

    Shapes as in causal_conv1d_fn; weight, bias and seq_idx are contiguous.
    """
    batch, dim, seqlen = x.shape
    out = torch.empty_like(x)
    channel_last = x.stride(1) <= x.stride(2)
    if config is None:
        config = config_for(channel_last, batch, dim, seqlen, x.dtype)
    tokens = config["RUNS"] * config["STEPS"] if channel_last else config["BLOCK_T"]
    t_blocks, d_blocks = triton.cdiv(seqlen, tokens), triton.cdiv(dim, config["BLOCK_D"])
    kernel, unit = _channel_first_kernel, 1
    if channel_last:
        kernel, unit = _channel_last_kernel, stride_unit(x.stride(0), x.stride(2))
        config = {**config, "UNIT": unit}
    with torch.cuda.device_of(x):
        kernel[(batch * t_blocks * d_blocks,)](
            x, weight, *pointers(x, bias, seq_idx, initial_states), out, *pointers(x, final_states),
            dim, seqlen, t_blocks, d_blocks,
            x.stride(0) // unit, x.stride(1), x.stride(2) // unit,
            *strides_of(initial_states), *out.stride(), *strides_of(final_states),
            WIDTH=weight.shape[1], SILU=silu, HAS_BIAS=bias is not None,
            HAS_SEQ_IDX=seq_idx is not None, HAS_INITIAL=initial_states is not None,
            HAS_FINAL=final_states is not None, INTERPRET=interpreting(), **config,
        )  # fmt: skip
    return out


def pointers(stand_in: torch.Tensor, *tensors: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """The tensors, with `stand_in` for those that are None: the kernel computes addresses, but reads none."""
    return tuple(stand_in if tensor is None else tensor for tensor in tensors)


def strides_of(tensor: torch.Tensor | None) -> tuple[int, ...]:
    """The strides of (batch, dim, columns), or zeros where there is no such tensor."""
    return (0, 0, 0) if tensor is None else tensor.stride()
