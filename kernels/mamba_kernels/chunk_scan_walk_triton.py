"""Triton forward of the SSD scan in one walk: outputs are computed where the state is, in registers.

Nothing of the states between blocks goes through memory; in turn each head computes C B^T by itself.
"""

import torch
import triton
import triton.language as tl

from mamba_kernels.chunk_scan_blocks_triton import (
    COUNTS,
    Packing,
    load_run,
    load_tile,
    locate,
    offset_dtype,
    pad_to_dot,
    strides,
    tl_dtype,
)


@triton.jit(do_not_specialize=COUNTS)
def _walk_kernel(
    x, B, C, D, z, y, steps, decays, runs, start_states, end_states,
    nheads, group_heads, headdim, d_state, segments,
    rows, seqlen, row_blocks, cu_seqlens, block_offsets, block_rows,
    stride_x_b, stride_x_l, stride_x_h, stride_x_p,
    stride_B_b, stride_B_l, stride_B_g, stride_B_n,
    stride_C_b, stride_C_l, stride_C_g, stride_C_n,
    stride_D_h, stride_D_p,
    stride_z_b, stride_z_l, stride_z_h, stride_z_p,
    stride_y_b, stride_y_l, stride_y_h, stride_y_p,
    stride_runs_b,
    HAS_START: tl.constexpr, HAS_D: tl.constexpr, HAS_Z: tl.constexpr, HAS_RUNS: tl.constexpr,
    VARLEN: tl.constexpr, DOT: tl.constexpr, OFFSET: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Carry the state H (BLOCK_N, BLOCK_P) over the blocks of one segment, and with it write y:

    y[i] = exp(a[i]) C[i] H + sum over j <= i of exp(a[i] - a[j]) dt[j] (C[i] . B[j]) x[j] + D x[i]
    H <- exp(a[last]) H + sum over j of exp(a[last] - a[j]) dt[j] B[j] x[j]^T
    """
    # Program: row, segment, head, tile of headdim, from the slowest to the fastest: neighbours share B, C.
    pid = tl.program_id(0).to(tl.int64)
    ptiles = tl.cdiv(headdim, BLOCK_P)
    ptile = pid % ptiles
    head = (pid // ptiles) % nheads
    segment = (pid // (ptiles * nheads)) % segments
    row = pid // (ptiles * nheads * segments)
    batch, start, length, first, blocks = locate(row, seqlen, row_blocks, cu_seqlens, block_offsets, VARLEN)
    segment_blocks = tl.cdiv(blocks, segments)
    begin = tl.minimum(segment * segment_blocks, blocks)
    count = tl.minimum(segment_blocks, blocks - begin)

    i = tl.arange(0, BLOCK).to(OFFSET)
    n = tl.arange(0, BLOCK_N).to(OFFSET)
    p = ptile.to(OFFSET) * BLOCK_P + tl.arange(0, BLOCK_P).to(OFFSET)
    group = head // group_heads
    x += batch * stride_x_b + start * stride_x_l + head * stride_x_h
    B += batch * stride_B_b + start * stride_B_l + group * stride_B_g
    C += batch * stride_C_b + start * stride_C_l + group * stride_C_g
    z += batch * stride_z_b + start * stride_z_l + head * stride_z_h
    y += batch * stride_y_b + start * stride_y_l + head * stride_y_h
    runs += batch * stride_runs_b
    if HAS_D:
        d = tl.load(D + head * stride_D_h + p * stride_D_p, mask=p < headdim, other=0.0).to(tl.float32)

    # Segment-level states are (rows, segments, nheads, headdim, d_state) fp32.
    place = ((row * segments + segment) * nheads + head) * headdim * d_state
    transposed = n[:, None] + p[None, :] * d_state
    mask = (n[:, None] < d_state) & (p[None, :] < headdim)
    if HAS_START:
        state = tl.load(start_states + place + transposed, mask=mask, other=0.0)
    else:
        state = tl.zeros((BLOCK_N, BLOCK_P), dtype=tl.float32)
    for step in range(0, count):
        k = begin + step
        number = (first + k) * nheads + head
        left = tl.minimum(length - k * BLOCK, BLOCK).to(tl.int32)
        a = tl.load(decays + number * BLOCK + i)
        dt = tl.load(steps + number * BLOCK + i)
        a_last = tl.load(decays + number * BLOCK + BLOCK - 1)
        c = load_tile(C + k * BLOCK * stride_C_l, i, stride_C_l, left, n, stride_C_n, d_state).to(DOT)
        b = load_tile(B + k * BLOCK * stride_B_l, i, stride_B_l, left, n, stride_B_n, d_state).to(DOT)
        xk = load_tile(x + k * BLOCK * stride_x_l, i, stride_x_l, left, p, stride_x_p, headdim)
        seen = i[:, None] >= i[None, :]
        into, onward, carry = tl.exp2(a), tl.exp2(a_last - a) * dt, tl.exp2(a_last)
        if HAS_RUNS:
            run = load_run(runs + k * BLOCK, i, left)
            before = tl.load(runs + tl.maximum(k * BLOCK - 1, 0))
            last = tl.load(runs + k * BLOCK + left - 1)
            seen = seen & (run[:, None] == load_run(runs + k * BLOCK, i, left)[None, :])
            into = tl.where(run == before, into, 0.0)
            onward = tl.where(run == last, onward, 0.0)
            carry = tl.where(before == last, carry, 0.0)

        scores = tl.dot(c, tl.trans(b), input_precision="ieee")
        acc = tl.dot(c, state.to(DOT), input_precision="ieee") * into[:, None]
        # What is not seen has a positive exponent, which is not to overflow.
        weights = scores * tl.exp2(tl.where(seen, a[:, None] - a[None, :], float("-inf"))) * dt[None, :]
        acc = tl.dot(weights.to(DOT), xk.to(DOT), acc=acc, input_precision="ieee")
        x32 = xk.to(tl.float32)
        weighted = (x32 * onward[:, None]).to(DOT)
        state = tl.dot(tl.trans(b), weighted, acc=state * carry, input_precision="ieee")
        if HAS_D:
            acc += x32 * d[None, :]
        if HAS_Z:
            zk = load_tile(z + k * BLOCK * stride_z_l, i, stride_z_l, left, p, stride_z_p, headdim)
            zk = zk.to(tl.float32)
            acc *= zk * tl.sigmoid(zk)
        ptrs = y + k * BLOCK * stride_y_l + i[:, None] * stride_y_l + p[None, :] * stride_y_p
        tl.store(ptrs, acc.to(y.dtype.element_ty), mask=(i[:, None] < left) & (p[None, :] < headdim))

    if segment == segments - 1:
        place = (row * nheads + head) * headdim * d_state
        tl.store(end_states + place + transposed, state, mask=mask)


def launch_walk(
    x: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    steps: torch.Tensor,
    decays: torch.Tensor,
    runs: torch.Tensor | None,
    start_states: torch.Tensor | None,
    packing: Packing,
    config: dict,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y, as x, and each row's last state (rows, nheads, headdim, d_state) fp32.

    start_states: (rows, segments, nheads, headdim, d_state) fp32, contiguous, or None for zeros.
    """
    nheads, headdim = x.shape[2:]
    ngroups, d_state = B.shape[2:]
    # A packed entry may have tokens outside every sequence; the blocks cover all others.
    empty = torch.empty if packing.cu_seqlens is None else torch.zeros
    y = empty(x.shape, dtype=x.dtype, device=x.device)
    last = x.new_empty(packing.rows, nheads, headdim, d_state, dtype=torch.float32)
    grid = (packing.rows * config["segments"] * nheads * triton.cdiv(headdim, config["BLOCK_P"]),)
    _walk_kernel[grid](
        x, B, C, D, z if z is not None else x, y, steps, decays, runs if runs is not None else x,
        start_states, last,
        nheads, nheads // ngroups, headdim, d_state, config["segments"],
        *packing.args,
        *x.stride(), *B.stride(), *C.stride(),
        *((*D.stride(), 0)[:2] if D is not None else (0, 0)),
        *strides(z, 4), *y.stride(), runs.stride(0) if runs is not None else 0,
        HAS_START=start_states is not None, HAS_D=D is not None, HAS_Z=z is not None,
        HAS_RUNS=runs is not None, VARLEN=packing.cu_seqlens is not None, DOT=tl_dtype(dtype),
        OFFSET=offset_dtype(packing.block, x, B, C, z, y), BLOCK=packing.block, BLOCK_N=pad_to_dot(d_state),
        BLOCK_P=config["BLOCK_P"], num_warps=config["num_warps"], num_stages=config["num_stages"],
    )  # fmt: skip
    return y, last
