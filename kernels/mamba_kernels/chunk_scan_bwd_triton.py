"""Triton backward of the SSD scan. Nothing but the arguments is kept from the forward.

The states that enter the blocks are computed again, and the gradients of the states that leave them by
the same kernel from the other end; given both, every block has its gradients by itself. What is summed over
programs is stored by program and added up in a fixed order, so the result is deterministic.
"""

import torch
import triton
import triton.language as tl

from mamba_kernels.chunk_scan_blocks_triton import (
    COUNTS,
    Limits,
    choose_heads,
    choose_segments,
    device_limits,
    dot_dtype,
    largest_block,
    locate,
    pack,
    pad_to_dot,
    resident,
    row_of_block,
    too_large,
)
from mamba_kernels.chunk_scan_gradients_triton import launch_gradients
from mamba_kernels.chunk_scan_states_triton import Walk, launch_decays, launch_states, softplus


@triton.jit(do_not_specialize=COUNTS)
def _decay_gradient_kernel(
    dt, A, dt_bias, dsteps, ddecays, ddt, dA, ddt_bias,
    dt_min, dt_max, nheads, ptiles, blocks,
    rows, seqlen, row_blocks, cu_seqlens, block_offsets, block_rows,
    stride_dt_b, stride_dt_l, stride_dt_h,
    stride_ddt_b, stride_ddt_l, stride_ddt_h,
    HAS_BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, VARLEN: tl.constexpr,
    BLOCK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Back through a = cumsum(step A), the limits, softplus and the bias; sums by block for dA, ddt_bias."""
    # Program (block, tile of HEADS heads); tiles are (HEADS, BLOCK), as in `_decay_kernel`.
    block = tl.program_id(0).to(tl.int64)
    row = row_of_block(block, row_blocks, block_rows, VARLEN)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS).to(tl.int64)
    sums = block * nheads + head
    if VARLEN:
        if row >= rows:
            tl.store(dA + sums, tl.zeros((HEADS,), tl.float32), mask=head < nheads)
            tl.store(ddt_bias + sums, tl.zeros((HEADS,), tl.float32), mask=head < nheads)
            return
    batch, start, length, first, _ = locate(row, seqlen, row_blocks, cu_seqlens, block_offsets, VARLEN)
    offset = tl.arange(0, BLOCK)[None, :]
    token = (block - first) * BLOCK + offset
    valid = (head[:, None] < nheads) & (token < length)

    ptrs = dt + batch * stride_dt_b + (start + token) * stride_dt_l + head[:, None] * stride_dt_h
    value = tl.load(ptrs, mask=valid, other=0.0).to(tl.float32)
    if HAS_BIAS:
        value += tl.load(dt_bias + head, mask=head < nheads, other=0.0).to(tl.float32)[:, None]
    step = value
    if SOFTPLUS:
        step = softplus(value)
    passed = (step >= dt_min) & (step <= dt_max)
    step = tl.minimum(tl.maximum(step, dt_min), dt_max)

    dstep = tl.zeros((HEADS, BLOCK), dtype=tl.float32)
    ddecay = tl.zeros((HEADS, BLOCK), dtype=tl.float32)
    for ptile in range(0, ptiles):
        at = ((ptile * blocks + block) * nheads + head[:, None]) * BLOCK + offset
        dstep += tl.load(dsteps + at, mask=valid, other=0.0)
        ddecay += tl.load(ddecays + at, mask=valid, other=0.0)
    drate = tl.cumsum(ddecay, axis=1, reverse=True)
    rate = tl.load(A + head, mask=head < nheads, other=0.0).to(tl.float32)[:, None]
    tl.store(dA + sums, tl.sum(tl.where(valid, drate * step, 0.0), axis=1), mask=head < nheads)
    dvalue = tl.where(valid & passed, dstep + drate * rate, 0.0)
    if SOFTPLUS:
        dvalue *= tl.where(value > 20.0, 1.0, tl.sigmoid(value))
    # Of a bare product each lane would fuse its own into the first addition, so that the lanes of a row, and
    # the two warps that may hold it, would not agree on the last bit of its sum.
    tl.store(ddt_bias + sums, tl.sum(tl.where(valid, dvalue, 0.0), axis=1), mask=head < nheads)
    ptrs = ddt + batch * stride_ddt_b + (start + token) * stride_ddt_l + head[:, None] * stride_ddt_h
    tl.store(ptrs, dvalue.to(ddt.dtype.element_ty), mask=valid)


# BLOCK, BLOCK_P, and (num_warps, num_stages) of the states and of the gradients kernel, best first.
TILES_16_BIT = (
    (64, 64, (8, 3), (8, 3)),
    (64, 64, (8, 3), (8, 2)),
    (64, 64, (4, 2), (8, 1)),
    (32, 32, (4, 2), (4, 2)),
    (32, 32, (4, 2), (4, 1)),
    (16, 16, (4, 1), (4, 1)),
)
TILES_32_BIT = (
    (16, 32, (8, 1), (8, 1)),
    (16, 16, (4, 1), (4, 1)),
)


def config_for(
    rows: int,
    seqlen: int,
    nheads: int,
    headdim: int,
    ngroups: int,
    d_state: int,
    dtype: torch.dtype,
    limits: Limits,
) -> dict:
    """Choose the blocks of a backward: the first tiles of the list whose buffers fit in shared memory."""
    size, block_n = dtype.itemsize, pad_to_dot(d_state)
    for block, block_p, states, gradients in TILES_32_BIT if size == 4 else TILES_16_BIT:
        block = min(block, largest_block(headdim), pad_to_dot(seqlen))
        block_p = min(block_p, pad_to_dot(headdim))
        # B and C stay; both states, x and dy are loaded ahead; x and dy are also stored weighted.
        ahead = gradients[1] * 2 * (block_n + block) * block_p
        total = (2 * block * block_n + ahead + 2 * block * block_p + block * block) * size
        states_bytes = max(states[1], 2) * block * (block_n + block_p) * size
        if max(total, states_bytes) + 4096 <= limits.shared_memory:
            break
    else:
        raise too_large(d_state, dtype, limits)
    row_blocks = triton.cdiv(seqlen, block)
    ptiles = triton.cdiv(headdim, block_p)
    slots = resident(states_bytes, limits)
    segments = choose_segments(row_blocks, rows * nheads * ptiles, limits.processors, slots)
    slots = resident(total, limits)
    heads = choose_heads(rows * row_blocks * ptiles * ngroups, nheads // ngroups, slots)
    return {
        "BLOCK": block,
        "states": {"BLOCK_P": block_p, "segments": segments, "num_warps": states[0], "num_stages": states[1]},
        "gradients": {
            "BLOCK_P": block_p, "heads": heads, "num_warps": gradients[0], "num_stages": gradients[1],
        },
        "sums": {"BLOCK_N": min(block_n, 64), "BLOCK_P": block_p, "num_warps": 4, "num_stages": states[1]},
    }  # fmt: skip


def launch_backward(
    dout: torch.Tensor,
    dlast: torch.Tensor | None,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    initial_states: torch.Tensor | None,
    runs: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    config: dict | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of x, dt, A, B, C, D, z, dt_bias and initial_states, each in its argument's dtype.

    dout: the gradient of y, any strides; dlast: that of the last states, as initial_states, or None.
    Arguments are as in `launch_forward`. The gradient of the initial states comes in float32 always.
    """
    batch, seqlen, nheads, headdim = x.shape
    ngroups, d_state = B.shape[2:]
    dtype = dot_dtype(x, B, C)
    rows = batch if cu_seqlens is None else cu_seqlens.numel() - 1
    if config is None:
        config = config_for(rows, seqlen, nheads, headdim, ngroups, d_state, dtype, device_limits(x.device))
    packing = pack(batch, seqlen, cu_seqlens, config["BLOCK"])
    steps, decays = launch_decays(dt, A, dt_bias, dt_softplus, dt_limit, packing)
    walks = [Walk(x, B, None, initial_states), Walk(dout, C, z, dlast)]
    (entering, _), (leaving, dinitial) = launch_states(
        walks, steps, decays, runs, packing, config["states"], dtype
    )
    dx, dB, dC, dz, dD, dsteps, ddecays = launch_gradients(
        dout, x, B, C, D, z, steps, decays, entering, leaving, runs, packing, config, dtype
    )
    varlen = cu_seqlens is not None
    ddt = (torch.zeros if varlen else torch.empty)(dt.shape, dtype=dt.dtype, device=dt.device)
    dA, ddt_bias = (dsteps.new_empty(packing.blocks, nheads) for _ in range(2))
    if packing.blocks:
        heads = min(16, triton.next_power_of_2(nheads))
        _decay_gradient_kernel[(packing.blocks, triton.cdiv(nheads, heads))](
            dt, A, dt_bias, dsteps, ddecays, ddt, dA, ddt_bias,
            float(dt_limit[0]), float(dt_limit[1]), nheads, dsteps.shape[0], packing.blocks,
            *packing.args,
            *dt.stride(), *ddt.stride(),
            HAS_BIAS=dt_bias is not None, SOFTPLUS=dt_softplus, VARLEN=varlen,
            BLOCK=packing.block, HEADS=heads, num_warps=4,
        )  # fmt: skip
    if dD is not None:
        dD = dD.sum(0) if D.dim() == 2 else dD.sum((0, 1))
    return (
        dx,
        ddt,
        dA.sum(0).to(A.dtype),
        dB,
        dC,
        dD.to(D.dtype) if D is not None else None,
        dz,
        ddt_bias.sum(0).to(dt_bias.dtype) if dt_bias is not None else None,
        dinitial,
    )
