"""Triton backward of the SSD scan. Nothing but the arguments is kept from the forward.

The states that enter the blocks are computed again, and the gradients of the states that leave them by
the same kernel from the other end. Given both, every block has its gradients by itself: a program takes
one block and a run of heads of one group, and sums the gradients of B and C over its heads in registers.
What is summed over programs is stored by program and added up in a fixed order, so the result is
deterministic.
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
    load_run,
    load_tile,
    locate,
    offset_dtype,
    pack,
    pad_to_dot,
    resident,
    row_of_block,
    strides,
    tl_dtype,
    too_large,
)
from mamba_kernels.chunk_scan_states_triton import launch_decays, launch_states, softplus


@triton.jit(do_not_specialize=COUNTS)
def _gradients_kernel(
    x, B, C, D, z, dout, steps, decays, entering, leaving, runs,
    dx, dz, dB, dC, dD, dsteps, ddecays,
    nheads, ngroups, group_heads, headdim, d_state, program_heads, blocks,
    rows, seqlen, row_blocks, cu_seqlens, block_offsets, block_rows,
    stride_x_b, stride_x_l, stride_x_h, stride_x_p,
    stride_B_b, stride_B_l, stride_B_g, stride_B_n,
    stride_C_b, stride_C_l, stride_C_g, stride_C_n,
    stride_D_h, stride_D_p,
    stride_z_b, stride_z_l, stride_z_h, stride_z_p,
    stride_o_b, stride_o_l, stride_o_h, stride_o_p,
    stride_dx_b, stride_dx_l, stride_dx_h, stride_dx_p,
    stride_dz_b, stride_dz_l, stride_dz_h, stride_dz_p,
    stride_part, stride_dB_b, stride_dB_l, stride_dB_g, stride_dB_n,
    stride_runs_b,
    HAS_D: tl.constexpr, D_PER_CHANNEL: tl.constexpr, HAS_Z: tl.constexpr, HAS_RUNS: tl.constexpr,
    VARLEN: tl.constexpr, DOT: tl.constexpr, OFFSET: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Gradients of one block, G being that of the state after it, H the state before it, dy that of y.

    With s[i,j] = C[i] . B[j], w[i,j] = exp(a[i] - a[j]) for j <= i, and r[j] = exp(a[last] - a[j]):

        dx[j] = dt[j] (sum over i of w s dy[i] + r[j] G B[j]) + D dy[j]
        dB[j] = sum over heads of sum over i of w dt[j] (dy[i] . x[j]) C[i] + r[j] dt[j] x[j]^T G
        dC[i] = sum over heads of sum over j of w dt[j] (dy[i] . x[j]) B[j] + exp(a[i]) dy[i]^T H

    dsteps is the gradient of dt where it is a factor; ddecays is that of a, in which each exp(a[i] - a[j])
    counts for i and against j. Terms of i = j have no decay; they are kept apart, as in a sum they would
    cancel, and drown what is left. Square tiles are (j, i), so that sums over i are along a row.
    """
    # Program (block; tile of headdim, part of a group's heads, group, from the fastest).
    block = tl.program_id(0).to(tl.int64)
    ptiles = tl.cdiv(headdim, BLOCK_P)
    parts = tl.cdiv(group_heads, program_heads)
    ptile = tl.program_id(1) % ptiles
    part = (tl.program_id(1) // ptiles) % parts
    group = (tl.program_id(1) // (ptiles * parts)).to(tl.int64)
    row = row_of_block(block, row_blocks, block_rows, VARLEN)
    if VARLEN:
        if row >= rows:
            return
    batch, start, length, first, _ = locate(row, seqlen, row_blocks, cu_seqlens, block_offsets, VARLEN)
    begin = (block - first) * BLOCK
    left = tl.minimum(length - begin, BLOCK).to(tl.int32)
    start += begin

    i = tl.arange(0, BLOCK).to(OFFSET)
    n = tl.arange(0, BLOCK_N).to(OFFSET)
    p = ptile.to(OFFSET) * BLOCK_P + tl.arange(0, BLOCK_P).to(OFFSET)
    B += batch * stride_B_b + start * stride_B_l + group * stride_B_g
    C += batch * stride_C_b + start * stride_C_l + group * stride_C_g
    x += batch * stride_x_b + start * stride_x_l
    z += batch * stride_z_b + start * stride_z_l
    dout += batch * stride_o_b + start * stride_o_l
    dx += batch * stride_dx_b + start * stride_dx_l
    dz += batch * stride_dz_b + start * stride_dz_l

    b = load_tile(B, i, stride_B_l, left, n, stride_B_n, d_state).to(DOT)
    c = load_tile(C, i, stride_C_l, left, n, stride_C_n, d_state).to(DOT)
    seen = i[:, None] < i[None, :]
    if HAS_RUNS:
        runs += batch * stride_runs_b + begin
        run = load_run(runs, i, left)
        before = tl.load(runs - tl.minimum(begin, 1))
        last = tl.load(runs + left - 1)
        seen = seen & (run[:, None] == run[None, :])
    scores = tl.dot(b, tl.trans(c), input_precision="ieee")
    diagonal = tl.sum(tl.where(i[:, None] == i[None, :], scores, 0.0), axis=1)
    scores = tl.where(seen, scores, 0.0)
    db = tl.zeros((BLOCK, BLOCK_N), dtype=tl.float32)
    dc = tl.zeros((BLOCK, BLOCK_N), dtype=tl.float32)
    dscores = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    ddiagonal = tl.zeros((BLOCK,), dtype=tl.float32)

    head0 = group * group_heads + part * program_heads
    heads = tl.minimum(program_heads, group_heads - part * program_heads)
    for head in range(head0, head0 + heads):
        number = block * nheads + head
        h = load_tile(entering + number * d_state * headdim, n, headdim, d_state, p, 1, headdim)
        g = load_tile(leaving + number * d_state * headdim, n, headdim, d_state, p, 1, headdim)
        xk = load_tile(x + head * stride_x_h, i, stride_x_l, left, p, stride_x_p, headdim)
        dy = load_tile(dout + head * stride_o_h, i, stride_o_l, left, p, stride_o_p, headdim)
        a = tl.load(decays + number * BLOCK + i)
        a_last = tl.load(decays + number * BLOCK + BLOCK - 1)
        dt = tl.load(steps + number * BLOCK + i)
        into, onward, carry = tl.exp2(a), tl.exp2(a_last - a), tl.exp2(a_last)
        if HAS_RUNS:
            into = tl.where(run == before, into, 0.0)
            onward = tl.where(run == last, onward, 0.0)
            carry = tl.where(before == last, carry, 0.0)
        x32, dy32 = xk.to(tl.float32), dy.to(tl.float32)
        if HAS_Z:
            zk = load_tile(z + head * stride_z_h, i, stride_z_l, left, p, stride_z_p, headdim)
            zk = zk.to(tl.float32)
            sigmoid = tl.sigmoid(zk)
            dout32 = dy32
            dy32 *= zk * sigmoid
        xk, dy = xk.to(DOT), dy32.to(DOT)

        within = tl.exp2(tl.minimum(a[None, :] - a[:, None], 0.0))
        inner = within * tl.dot(xk, tl.trans(dy), input_precision="ieee")
        weights = within * scores
        dscores += inner * dt[:, None]
        inner *= scores
        dx_outer = tl.dot(b, g, input_precision="ieee") * onward[:, None]
        y_outer = tl.dot(c, h, input_precision="ieee") * into[:, None]

        same = tl.sum(dy32 * x32, axis=1)
        ddiagonal += same * dt
        dstep_inner = tl.sum(inner, axis=1)
        dstep_outer = tl.sum(dx_outer * x32, axis=1)
        dstep = dstep_inner + dstep_outer + diagonal * same
        # What leaves with the last token passes through no further decay of the block.
        passing = tl.where(i < left - 1, dstep_outer * dt, 0.0)
        through = tl.sum(h.to(tl.float32) * g.to(tl.float32)) * carry + tl.sum(passing)
        ddecay = tl.sum(inner * dt[:, None], axis=0) + tl.sum(y_outer * dy32, axis=1)
        ddecay += tl.where(i == left - 1, through, 0.0) - dstep_inner * dt - passing
        out = ((ptile * blocks + block) * nheads + head) * BLOCK + i
        tl.store(dsteps + out, dstep)
        tl.store(ddecays + out, ddecay)

        # Not by `acc`: as a chain of products the compiler would lay the tile out along its rows only.
        dxk = tl.dot(weights.to(DOT), dy, input_precision="ieee") * dt[:, None] + dx_outer * dt[:, None]
        direct = (diagonal * dt)[:, None]
        if HAS_D:
            d = tl.load(D + head * stride_D_h + p * stride_D_p, mask=p < headdim, other=0.0)
            direct += d.to(tl.float32)[None, :]
            if D_PER_CHANNEL:
                tl.store(dD + number * headdim + p, tl.sum(dy32 * x32, axis=0), mask=p < headdim)
            else:
                tl.store(dD + ptile * blocks * nheads + number, tl.sum(same))
        dxk += dy32 * direct
        mask = (i[:, None] < left) & (p[None, :] < headdim)
        ptrs = dx + head * stride_dx_h + i[:, None] * stride_dx_l + p[None, :] * stride_dx_p
        tl.store(ptrs, dxk.to(dx.dtype.element_ty), mask=mask)
        if HAS_Z:
            y = tl.dot(tl.trans((weights * dt[:, None]).to(DOT)), xk, acc=y_outer, input_precision="ieee")
            y += x32 * direct
            dzk = dout32 * y * sigmoid * (1.0 + zk * (1.0 - sigmoid))
            ptrs = dz + head * stride_dz_h + i[:, None] * stride_dz_l + p[None, :] * stride_dz_p
            tl.store(ptrs, dzk.to(dz.dtype.element_ty), mask=mask)

        db += tl.dot(xk, tl.trans(g), input_precision="ieee") * (onward * dt)[:, None]
        dc += tl.dot(dy, tl.trans(h), input_precision="ieee") * into[:, None]

    ddiagonal = tl.where(i[:, None] == i[None, :], ddiagonal[:, None], 0.0)
    dscores = tl.where(seen, dscores, ddiagonal).to(DOT)
    db = tl.dot(dscores, c, acc=db, input_precision="ieee")
    dc = tl.dot(tl.trans(dscores), b, acc=dc, input_precision="ieee")
    place = (part * ptiles + ptile).to(tl.int64) * stride_part
    place += batch * stride_dB_b + start * stride_dB_l + group * stride_dB_g
    tile = place + i[:, None] * stride_dB_l + n[None, :] * stride_dB_n
    mask = (i[:, None] < left) & (n[None, :] < d_state)
    tl.store(dB + tile, db, mask=mask)
    tl.store(dC + tile, dc, mask=mask)


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
    tl.store(ddt_bias + sums, tl.sum(dvalue, axis=1), mask=head < nheads)
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
        block, block_p = (
            min(block, largest_block(headdim), pad_to_dot(seqlen)),
            min(block_p, pad_to_dot(headdim)),
        )
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
    entering, _ = launch_states(
        x, B, None, steps, decays, runs, initial_states, packing, config["states"], dtype
    )
    leaving, dinitial = launch_states(
        dout, C, z, steps, decays, runs, dlast, packing, config["states"], dtype, reverse=True
    )

    tile = config["gradients"]
    group_heads = nheads // ngroups
    parts, ptiles = triton.cdiv(group_heads, tile["heads"]), triton.cdiv(headdim, tile["BLOCK_P"])
    # A packed entry may have tokens outside every sequence; the blocks cover all others.
    new = torch.empty if cu_seqlens is None else torch.zeros
    f32 = dict(dtype=torch.float32, device=x.device)
    dx, ddt = (new(t.shape, dtype=t.dtype, device=t.device) for t in (x, dt))
    dz = new(z.shape, dtype=z.dtype, device=z.device) if z is not None else None
    dB, dC = (new(parts * ptiles, *B.shape, **f32) for _ in range(2))
    dD = None
    if D is not None:
        # With cu_seqlens, a block of no row adds nothing.
        per_program = (packing.blocks, nheads, headdim) if D.dim() == 2 else (ptiles, packing.blocks, nheads)
        dD = new(per_program, **f32)
    dsteps, ddecays = (torch.empty(ptiles, *steps.shape, **f32) for _ in range(2))
    dA, ddt_bias = (torch.empty(packing.blocks, nheads, **f32) for _ in range(2))
    if packing.blocks:
        varlen = cu_seqlens is not None
        _gradients_kernel[(packing.blocks, ngroups * parts * ptiles)](
            x, B, C, D, z if z is not None else x, dout, steps, decays, entering, leaving,
            runs if runs is not None else x,
            dx, dz if dz is not None else dx, dB, dC, dD, dsteps, ddecays,
            nheads, ngroups, group_heads, headdim, d_state, tile["heads"], packing.blocks,
            *packing.args,
            *x.stride(), *B.stride(), *C.stride(),
            *((*D.stride(), 0)[:2] if D is not None else (0, 0)),
            *strides(z, 4), *dout.stride(), *dx.stride(), *strides(dz, 4), *dB.stride(),
            runs.stride(0) if runs is not None else 0,
            HAS_D=D is not None, D_PER_CHANNEL=D is not None and D.dim() == 2, HAS_Z=z is not None,
            HAS_RUNS=runs is not None, VARLEN=varlen,
            DOT=tl_dtype(dtype), OFFSET=offset_dtype(packing.block, x, B, C, z, dout, dx),
            BLOCK=packing.block, BLOCK_N=pad_to_dot(d_state),
            BLOCK_P=tile["BLOCK_P"], num_warps=tile["num_warps"], num_stages=tile["num_stages"],
        )  # fmt: skip
        heads = min(16, triton.next_power_of_2(nheads))
        _decay_gradient_kernel[(packing.blocks, triton.cdiv(nheads, heads))](
            dt, A, dt_bias, dsteps, ddecays, ddt, dA, ddt_bias,
            float(dt_limit[0]), float(dt_limit[1]), nheads, ptiles, packing.blocks,
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
        dB.sum(0).to(B.dtype),
        dC.sum(0).to(C.dtype),
        dD.to(D.dtype) if D is not None else None,
        dz,
        ddt_bias.sum(0).to(dt_bias.dtype) if dt_bias is not None else None,
        dinitial,
    )
