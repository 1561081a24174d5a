"""Triton kernels of the SSD scan's backward: the gradients of a block, given the states on both sides.

With the states that enter a block, and the gradients of those that leave it, every block has its gradients
by itself. A program takes one block and a run of heads of one group, whose scores it computes once. The
gradients of B and C are sums over heads: their part within the block, which needs the scores' gradients,
is summed in one kernel, and the part through the states, a product over all heads, in another.
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
    row_of_block,
    strides,
    tl_dtype,
)


@triton.jit(do_not_specialize=COUNTS)
def _gradients_kernel(
    x, B, C, D, z, dout, steps, decays, entering, leaving, runs,
    dx, dz, dB, dC, dD, dsteps, ddecays,
    nheads, group_heads, headdim, d_state, program_heads, blocks,
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
        dB[j] = sum over heads of sum over i of w dt[j] (dy[i] . x[j]) C[i]
        dC[i] = sum over heads of sum over j of w dt[j] (dy[i] . x[j]) B[j]

    What dB and dC get from the states comes from `_state_gradients_kernel`. dsteps is the gradient of dt
    where it is a factor; ddecays is that of a, in which each exp(a[i] - a[j]) counts for i and against j.
    Terms of i = j have no decay; they are kept apart, as in a sum they would cancel, and drown what is
    left. Square tiles are (j, i), so that sums over i are along a row.
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

    ddiagonal = tl.where(i[:, None] == i[None, :], ddiagonal[:, None], 0.0)
    dscores = tl.where(seen, dscores, ddiagonal).to(DOT)
    db = tl.dot(dscores, c, input_precision="ieee")
    dc = tl.dot(tl.trans(dscores), b, input_precision="ieee")
    place = (part * ptiles + ptile).to(tl.int64) * stride_part
    place += batch * stride_dB_b + start * stride_dB_l + group * stride_dB_g
    tile = place + i[:, None] * stride_dB_l + n[None, :] * stride_dB_n
    mask = (i[:, None] < left) & (n[None, :] < d_state)
    tl.store(dB + tile, db, mask=mask)
    tl.store(dC + tile, dc, mask=mask)


@triton.jit(do_not_specialize=COUNTS)
def _state_gradients_kernel(
    x, z, states, within, out, steps, decays, runs,
    nheads, group_heads, headdim, d_state, sums,
    rows, seqlen, row_blocks, cu_seqlens, block_offsets, block_rows,
    stride_x_b, stride_x_l, stride_x_h, stride_x_p,
    stride_z_b, stride_z_l, stride_z_h, stride_z_p,
    stride_sum, stride_o_b, stride_o_l, stride_o_g, stride_o_n,
    stride_runs_b,
    REVERSE: tl.constexpr, HAS_Z: tl.constexpr, HAS_RUNS: tl.constexpr, VARLEN: tl.constexpr,
    DOT: tl.constexpr, OFFSET: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """What B gets from the states after its blocks, and within its block, summed over the heads of a group:

        dB[j] = sum over heads of exp(a[last] - a[j]) dt[j] x[j]^T G, and the `sums` tensors of `within`

    With REVERSE, C from the states before, x being the gradient of y before the gate (multiplied by silu(z)
    here): dC[i] = sum over heads of exp(a[i]) x[i]^T H. The mirror image of `_states_kernel`.
    """
    # Program (block; tile of d_state, group, from the fastest).
    block = tl.program_id(0).to(tl.int64)
    ntiles = tl.cdiv(d_state, BLOCK_N)
    ntile = tl.program_id(1) % ntiles
    group = (tl.program_id(1) // ntiles).to(tl.int64)
    row = row_of_block(block, row_blocks, block_rows, VARLEN)
    if VARLEN:
        if row >= rows:
            return
    batch, start, length, first, _ = locate(row, seqlen, row_blocks, cu_seqlens, block_offsets, VARLEN)
    begin = (block - first) * BLOCK
    left = tl.minimum(length - begin, BLOCK).to(tl.int32)
    start += begin

    i = tl.arange(0, BLOCK).to(OFFSET)
    n = ntile.to(OFFSET) * BLOCK_N + tl.arange(0, BLOCK_N).to(OFFSET)
    p = tl.arange(0, BLOCK_P).to(OFFSET)
    x += batch * stride_x_b + start * stride_x_l
    z += batch * stride_z_b + start * stride_z_l
    if HAS_RUNS:
        runs += batch * stride_runs_b + begin
        run = load_run(runs, i, left)
        linked = run == tl.load(runs - tl.minimum(begin, 1) if REVERSE else runs + left - 1)
    acc = tl.zeros((BLOCK, BLOCK_N), dtype=tl.float32)
    ptiles = tl.cdiv(headdim, BLOCK_P)
    for step in range(0, group_heads * ptiles):
        head = group * group_heads + step // ptiles
        shift = (step % ptiles) * BLOCK_P
        number = block * nheads + head
        a = tl.load(decays + number * BLOCK + i)
        if REVERSE:
            weight = tl.exp2(a)
        else:
            a_last = tl.load(decays + number * BLOCK + BLOCK - 1)
            weight = tl.exp2(a_last - a) * tl.load(steps + number * BLOCK + i)
        if HAS_RUNS:
            weight = tl.where(linked, weight, 0.0)
        limit = headdim - shift
        xk = load_tile(
            x + head * stride_x_h + shift * stride_x_p, i, stride_x_l, left, p, stride_x_p, limit
        )  # fmt: skip
        if HAS_Z:
            zk = load_tile(
                z + head * stride_z_h + shift * stride_z_p, i, stride_z_l, left, p, stride_z_p, limit
            )  # fmt: skip
            zk = zk.to(tl.float32)
            xk = xk.to(tl.float32) * (zk * tl.sigmoid(zk))
        state = load_tile(states + number * d_state * headdim + shift, p, 1, limit, n, headdim, d_state)
        acc += tl.dot(xk.to(DOT), state, input_precision="ieee") * weight[:, None]

    tile = batch * stride_o_b + start * stride_o_l + group * stride_o_g
    tile += i[:, None] * stride_o_l + n[None, :] * stride_o_n
    mask = (i[:, None] < left) & (n[None, :] < d_state)
    for number in range(0, sums):
        acc += tl.load(within + number * stride_sum + tile, mask=mask, other=0.0)
    tl.store(out + tile, acc.to(out.dtype.element_ty), mask=mask)


def launch_gradients(
    dout: torch.Tensor,
    x: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    steps: torch.Tensor,
    decays: torch.Tensor,
    entering: torch.Tensor,
    leaving: torch.Tensor,
    runs: torch.Tensor | None,
    packing: Packing,
    config: dict,
    dtype: torch.dtype,
) -> tuple[torch.Tensor | None, ...]:
    """Return dx, dB, dC and dz as their arguments; dD, dsteps and ddecays in float32, unsummed.

    config: "gradients" has BLOCK_P, heads, num_warps and num_stages of the gradients kernel, "sums"
    BLOCK_N, BLOCK_P, num_warps and num_stages of the sums over heads. dD is (ptiles, blocks, nheads), or
    for D a channel (blocks, nheads, headdim); dsteps and ddecays are (ptiles, blocks, nheads, BLOCK).
    """
    nheads, headdim = x.shape[2:]
    ngroups, d_state = B.shape[2:]
    group_heads = nheads // ngroups
    tile, sums = config["gradients"], config["sums"]
    parts, ptiles = triton.cdiv(group_heads, tile["heads"]), triton.cdiv(headdim, tile["BLOCK_P"])
    # A packed entry may have tokens outside every sequence; the blocks cover all others.
    varlen = packing.cu_seqlens is not None
    new = torch.zeros if varlen else torch.empty
    f32 = dict(dtype=torch.float32, device=x.device)
    dx, dB, dC = (new(t.shape, dtype=t.dtype, device=t.device) for t in (x, B, C))
    dz = new(z.shape, dtype=z.dtype, device=z.device) if z is not None else None
    dB_within, dC_within = (torch.empty(parts * ptiles, *B.shape, **f32) for _ in range(2))
    dD = None
    if D is not None:
        # With cu_seqlens, a block of no row adds nothing.
        per_program = (packing.blocks, nheads, headdim) if D.dim() == 2 else (ptiles, packing.blocks, nheads)
        dD = new(per_program, **f32)
    dsteps, ddecays = (torch.empty(ptiles, *steps.shape, **f32) for _ in range(2))
    if not packing.blocks:
        return dx, dB, dC, dz, dD, dsteps, ddecays
    runs_args = (runs if runs is not None else x, runs.stride(0) if runs is not None else 0)
    flags = dict(HAS_Z=z is not None, HAS_RUNS=runs is not None, VARLEN=varlen, DOT=tl_dtype(dtype))
    _gradients_kernel[(packing.blocks, ngroups * parts * ptiles)](
        x, B, C, D, z if z is not None else x, dout, steps, decays, entering, leaving, runs_args[0],
        dx, dz if dz is not None else dx, dB_within, dC_within, dD, dsteps, ddecays,
        nheads, group_heads, headdim, d_state, tile["heads"], packing.blocks,
        *packing.args,
        *x.stride(), *B.stride(), *C.stride(),
        *((*D.stride(), 0)[:2] if D is not None else (0, 0)),
        *strides(z, 4), *dout.stride(), *dx.stride(), *strides(dz, 4), *dB_within.stride(), runs_args[1],
        HAS_D=D is not None, D_PER_CHANNEL=D is not None and D.dim() == 2, **flags,
        OFFSET=offset_dtype(packing.block, x, B, C, z, dout, dx), BLOCK=packing.block,
        BLOCK_N=pad_to_dot(d_state), BLOCK_P=tile["BLOCK_P"],
        num_warps=tile["num_warps"], num_stages=tile["num_stages"],
    )  # fmt: skip
    grid = (packing.blocks, ngroups * triton.cdiv(d_state, sums["BLOCK_N"]))
    for reverse, t, gate, states, within, out in (
        (False, x, None, leaving, dB_within, dB),
        (True, dout, z, entering, dC_within, dC),
    ):
        _state_gradients_kernel[grid](
            t, gate if gate is not None else t, states, within, out, steps, decays, runs_args[0],
            nheads, group_heads, headdim, d_state, parts * ptiles,
            *packing.args,
            *t.stride(), *strides(gate, 4), *within.stride(), runs_args[1],
            REVERSE=reverse, **(flags | {"HAS_Z": gate is not None}),
            OFFSET=offset_dtype(packing.block, t, gate, out), BLOCK=packing.block, BLOCK_N=sums["BLOCK_N"],
            BLOCK_P=sums["BLOCK_P"], num_warps=sums["num_warps"], num_stages=sums["num_stages"],
        )  # fmt: skip
    return dx, dB, dC, dz, dD, dsteps, ddecays
