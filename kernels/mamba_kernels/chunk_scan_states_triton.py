"""Triton kernels that both directions of the SSD scan share: step sizes, and the states between blocks.

What they leave for each block (see `chunk_scan_blocks_triton`), padded to BLOCK tokens:

    steps    (blocks, nheads, BLOCK) fp32   dt after bias, softplus and limits; 0 past the row's end
    decays   (blocks, nheads, BLOCK) fp32   a = cumsum(dt A) / ln 2 inside the block, so exp(.) is exp2(.)
    entering (blocks, nheads, d_state, headdim)   the state before the block, in the matmuls' dtype

States pass from block to block in registers. A row long enough to leave the GPU idle is cut into
segments, walked at the same time: first each is summarised from a zero state, then the summaries are
chained, then each is walked again from its true start.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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
from mamba_kernels.triton_math import LOG2E


@triton.jit
def softplus(v):
    """log(1 + exp(v)). log(w) u / (w - 1), w = 1 + u rounded, is log1p(u) to a few units of rounding."""
    u = tl.exp(tl.minimum(v, 20.0))
    w = 1.0 + u
    log1p = tl.where(w == 1.0, u, tl.log(w) * (u / tl.where(w == 1.0, 1.0, w - 1.0)))
    return tl.where(v > 20.0, v, log1p)


@triton.jit(do_not_specialize=COUNTS)
def _decay_kernel(
    dt, A, dt_bias, steps, decays,
    dt_min, dt_max, nheads,
    rows, seqlen, row_blocks, cu_seqlens, block_offsets, block_rows,
    stride_dt_b, stride_dt_l, stride_dt_h,
    HAS_BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, VARLEN: tl.constexpr,
    BLOCK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    # Program (block, tile of HEADS heads); tiles are (HEADS, BLOCK).
    block = tl.program_id(0).to(tl.int64)
    row = row_of_block(block, row_blocks, block_rows, VARLEN)
    if VARLEN:
        if row >= rows:
            return
    batch, start, length, first, _ = locate(row, seqlen, row_blocks, cu_seqlens, block_offsets, VARLEN)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None].to(tl.int64)
    offset = tl.arange(0, BLOCK)[None, :]
    token = (block - first) * BLOCK + offset

    valid = (head < nheads) & (token < length)
    ptrs = dt + batch * stride_dt_b + (start + token) * stride_dt_l + head * stride_dt_h
    step = tl.load(ptrs, mask=valid, other=0.0).to(tl.float32)
    if HAS_BIAS:
        step += tl.load(dt_bias + head, mask=head < nheads, other=0.0).to(tl.float32)
    if SOFTPLUS:
        step = softplus(step)
    # Comparisons rather than minimum and maximum, which would turn a NaN into a limit.
    step = tl.where(step < dt_min, dt_min, step)
    step = tl.where(step > dt_max, dt_max, step)
    step = tl.where(valid, step, 0.0)
    rate = tl.load(A + head, mask=head < nheads, other=0.0).to(tl.float32) * LOG2E
    decay = tl.cumsum(step * rate, axis=1)

    out = (block * nheads + head) * BLOCK + offset
    tl.store(steps + out, step, mask=head < nheads)
    tl.store(decays + out, decay, mask=head < nheads)


@triton.jit
def _walk(
    x, B, z, start_states, entering, end_states, factors,
    stride_x_b, stride_x_l, stride_x_h, stride_x_p,
    stride_B_b, stride_B_l, stride_B_g, stride_B_n,
    stride_z_b, stride_z_l, stride_z_h, stride_z_p,
    steps, decays, runs, stride_runs_b,
    nheads, group_heads, headdim, d_state, segments,
    seqlen, row_blocks, cu_seqlens, block_offsets,
    REVERSE: tl.constexpr, WALK: tl.constexpr, HAS_START: tl.constexpr, HAS_Z: tl.constexpr,
    HAS_RUNS: tl.constexpr, VARLEN: tl.constexpr, DOT: tl.constexpr, OFFSET: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Carry the state (BLOCK_N, BLOCK_P) over the blocks of one segment.

    Forward: H <- exp(a[last]) H + sum over j of exp(a[last] - a[j]) dt[j] B[j] x[j]^T.
    REVERSE carries the gradient of the state from the last block to the first, x being the gradient of
    y before the gate (multiplied by silu(z) here) and B being C: G <- exp(a[last]) G + sum over i of
    exp(a[i]) C[i] x[i]^T. WALK stores the state before each block (REVERSE: after it) and the row's
    last one; otherwise the segment's last state and the product of its decays are stored.
    """
    # Program: row, segment, head, tile of headdim, from the slowest to the fastest: neighbours share B.
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
    x += batch * stride_x_b + start * stride_x_l + head * stride_x_h
    B += batch * stride_B_b + start * stride_B_l + (head // group_heads) * stride_B_g
    z += batch * stride_z_b + start * stride_z_l + head * stride_z_h
    runs += batch * stride_runs_b
    tile = n[:, None] * headdim + p[None, :]
    transposed = n[:, None] + p[None, :] * d_state
    mask = (n[:, None] < d_state) & (p[None, :] < headdim)

    # Segment-level states are (rows, segments, nheads, headdim, d_state) fp32.
    place = ((row * segments + segment) * nheads + head) * headdim * d_state
    if HAS_START:
        state = tl.load(start_states + place + transposed, mask=mask, other=0.0)
    else:
        state = tl.zeros((BLOCK_N, BLOCK_P), dtype=tl.float32)
    factor = 1.0
    for step in range(0, count):
        k = begin + step
        if REVERSE:
            k = begin + count - 1 - step
        number = (first + k) * nheads + head
        if WALK:
            tl.store(entering + number * headdim * d_state + tile, state.to(DOT), mask=mask)
        left = tl.minimum(length - k * BLOCK, BLOCK).to(tl.int32)
        a = tl.load(decays + number * BLOCK + i)
        a_last = tl.load(decays + number * BLOCK + BLOCK - 1)
        carry = tl.exp2(a_last)
        if REVERSE:
            weight = tl.exp2(a)
        else:
            weight = tl.exp2(a_last - a) * tl.load(steps + number * BLOCK + i)
        if HAS_RUNS:
            run = load_run(runs + k * BLOCK, i, left)
            before = tl.load(runs + tl.maximum(k * BLOCK - 1, 0))
            last = tl.load(runs + k * BLOCK + left - 1)
            carry = tl.where(before == last, carry, 0.0)
            if REVERSE:
                weight = tl.where(run == before, weight, 0.0)
            else:
                weight = tl.where(run == last, weight, 0.0)
        bt = load_tile(B + k * BLOCK * stride_B_l, n, stride_B_n, d_state, i, stride_B_l, left)
        xk = load_tile(x + k * BLOCK * stride_x_l, i, stride_x_l, left, p, stride_x_p, headdim)
        xk = xk.to(tl.float32) * weight[:, None]
        if HAS_Z:
            zk = load_tile(z + k * BLOCK * stride_z_l, i, stride_z_l, left, p, stride_z_p, headdim)
            zk = zk.to(tl.float32)
            xk *= zk * tl.sigmoid(zk)
        state = tl.dot(bt.to(DOT), xk.to(DOT), acc=state * carry, input_precision="ieee")
        factor *= carry

    if not WALK:
        tl.store(end_states + place + transposed, state, mask=mask)
        if ptile == 0:
            tl.store(factors + (row * segments + segment) * nheads + head, factor)
    elif segment == (0 if REVERSE else segments - 1):
        place = (row * nheads + head) * headdim * d_state
        tl.store(end_states + place + transposed, state, mask=mask)


@triton.jit(do_not_specialize=COUNTS)
def _states_kernel(
    x, B, z, start_states, entering, end_states, factors,
    stride_x_b, stride_x_l, stride_x_h, stride_x_p,
    stride_B_b, stride_B_l, stride_B_g, stride_B_n,
    stride_z_b, stride_z_l, stride_z_h, stride_z_p,
    dout, C, gate, dend_states, leaving, dstart_states, dfactors,
    stride_o_b, stride_o_l, stride_o_h, stride_o_p,
    stride_C_b, stride_C_l, stride_C_g, stride_C_n,
    stride_g_b, stride_g_l, stride_g_h, stride_g_p,
    steps, decays, runs, stride_runs_b,
    nheads, group_heads, headdim, d_state, segments,
    seqlen, row_blocks, cu_seqlens, block_offsets,
    BOTH: tl.constexpr, WALK: tl.constexpr, HAS_START: tl.constexpr, HAS_DEND: tl.constexpr,
    HAS_GATE: tl.constexpr, HAS_RUNS: tl.constexpr, VARLEN: tl.constexpr, DOT: tl.constexpr,
    OFFSET: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """The walk forward; where BOTH, also the walk back, by as many programs more on the second axis."""
    if BOTH:
        if tl.program_id(1) == 1:
            _walk(
                dout, C, gate, dend_states, leaving, dstart_states, dfactors,
                stride_o_b, stride_o_l, stride_o_h, stride_o_p,
                stride_C_b, stride_C_l, stride_C_g, stride_C_n,
                stride_g_b, stride_g_l, stride_g_h, stride_g_p,
                steps, decays, runs, stride_runs_b,
                nheads, group_heads, headdim, d_state, segments,
                seqlen, row_blocks, cu_seqlens, block_offsets,
                True, WALK, HAS_DEND, HAS_GATE, HAS_RUNS, VARLEN, DOT, OFFSET, BLOCK, BLOCK_N, BLOCK_P,
            )  # fmt: skip
            return
    _walk(
        x, B, z, start_states, entering, end_states, factors,
        stride_x_b, stride_x_l, stride_x_h, stride_x_p,
        stride_B_b, stride_B_l, stride_B_g, stride_B_n,
        stride_z_b, stride_z_l, stride_z_h, stride_z_p,
        steps, decays, runs, stride_runs_b,
        nheads, group_heads, headdim, d_state, segments,
        seqlen, row_blocks, cu_seqlens, block_offsets,
        False, WALK, HAS_START, False, HAS_RUNS, VARLEN, DOT, OFFSET, BLOCK, BLOCK_N, BLOCK_P,
    )  # fmt: skip


@triton.jit(do_not_specialize=COUNTS)
def _chain_kernel(
    start_states, summaries, factors, nheads, size, segments,
    REVERSE: tl.constexpr, HAS_START: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Replace each segment's summary (rows, segments, nheads, size) by the state that enters it."""
    # Program (row and head, tile of the state).
    pid = tl.program_id(0).to(tl.int64)
    row, head = pid // nheads, pid % nheads
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    state = tl.zeros((BLOCK,), dtype=tl.float32)
    if HAS_START:
        state = tl.load(start_states + pid * size + offset, mask=offset < size, other=0.0)
    # Loaded ahead: the summaries do not wait for one another.
    for step in tl.range(0, segments, num_stages=4):
        segment = step
        if REVERSE:
            segment = segments - 1 - step
        number = (row * segments + segment) * nheads + head
        ptrs = summaries + number * size + offset
        summary = tl.load(ptrs, mask=offset < size, other=0.0)
        factor = tl.load(factors + number)
        tl.store(ptrs, state, mask=offset < size)
        state = state * factor + summary


def launch_decays(
    dt: torch.Tensor,
    A: torch.Tensor,
    dt_bias: torch.Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    packing: Packing,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return steps and decays, (blocks, nheads, BLOCK) fp32."""
    nheads = A.shape[0]
    steps = dt.new_empty(packing.blocks, nheads, packing.block, dtype=torch.float32)
    decays = torch.empty_like(steps)
    if not packing.blocks:
        return steps, decays
    heads = min(16, triton.next_power_of_2(nheads))
    _decay_kernel[(packing.blocks, triton.cdiv(nheads, heads))](
        dt, A, dt_bias, steps, decays,
        float(dt_limit[0]), float(dt_limit[1]), nheads,
        *packing.args,
        *dt.stride(),
        HAS_BIAS=dt_bias is not None, SOFTPLUS=dt_softplus, VARLEN=packing.cu_seqlens is not None,
        BLOCK=packing.block, HEADS=heads, num_warps=4,
    )  # fmt: skip
    return steps, decays


@dataclass(frozen=True)
class Walk:
    """What a walk reads: see `_walk` for what x, B and z are in which direction.

    start: (rows, nheads, headdim, d_state) fp32, contiguous, or None for zeros.
    """

    x: torch.Tensor
    B: torch.Tensor
    z: torch.Tensor | None
    start: torch.Tensor | None

    @property
    def strides(self) -> tuple[int, ...]:
        return (*self.x.stride(), *self.B.stride(), *strides(self.z, 4))


def launch_states(
    walks: Sequence[Walk],
    steps: torch.Tensor,
    decays: torch.Tensor,
    runs: torch.Tensor | None,
    packing: Packing,
    config: dict,
    dtype: torch.dtype,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Walk the blocks of every row forward, and with a second `Walk` also back, at the same time.

    config: BLOCK_P, segments, num_warps, num_stages. Returns for each walk the state at each block,
    (blocks, nheads, d_state, headdim) in `dtype`, and each row's last, (rows, nheads, headdim, d_state)
    fp32.
    """
    x, B = walks[0].x, walks[0].B
    nheads, headdim = x.shape[2:]
    ngroups, d_state = B.shape[2:]
    rows, segments = packing.rows, config["segments"]
    f32 = dict(dtype=torch.float32, device=x.device)
    at_blocks = [x.new_empty(packing.blocks, nheads, d_state, headdim, dtype=dtype) for _ in walks]
    last = [torch.empty(rows, nheads, headdim, d_state, **f32) for _ in walks]
    tensors = [t for walk in walks for t in (walk.x, walk.B, walk.z)]

    def launch(starts: list, ends: list, factors: list | None) -> None:
        sides = [
            (walk.x, walk.B, walk.z if walk.z is not None else walk.x, start, at, end, factor, *walk.strides)
            for walk, start, at, end, factor in zip(
                walks, starts, at_blocks, ends, factors or [None] * len(walks), strict=True
            )
        ]
        _states_kernel[(rows * segments * nheads * triton.cdiv(headdim, config["BLOCK_P"]), len(walks))](
            *sides[0], *sides[-1],
            steps, decays, runs if runs is not None else x, runs.stride(0) if runs is not None else 0,
            nheads, nheads // ngroups, headdim, d_state, segments,
            packing.seqlen, packing.row_blocks, packing.cu_seqlens, packing.block_offsets,
            BOTH=len(walks) == 2, WALK=factors is None,
            HAS_START=starts[0] is not None, HAS_DEND=starts[-1] is not None,
            HAS_GATE=walks[-1].z is not None,
            HAS_RUNS=runs is not None, VARLEN=packing.cu_seqlens is not None, DOT=tl_dtype(dtype),
            OFFSET=offset_dtype(packing.block, *tensors), BLOCK=packing.block, BLOCK_N=pad_to_dot(d_state),
            BLOCK_P=config["BLOCK_P"],
            num_warps=config["num_warps"], num_stages=config["num_stages"],
        )  # fmt: skip

    starts = [walk.start for walk in walks]
    if segments > 1:
        summaries = [torch.empty(rows, segments, nheads, headdim, d_state, **f32) for _ in walks]
        factors = [torch.empty(rows, segments, nheads, **f32) for _ in walks]
        launch([None] * len(walks), summaries, factors)
        size = headdim * d_state
        for reverse, (start, summary, factor) in enumerate(zip(starts, summaries, factors, strict=True)):
            _chain_kernel[(rows * nheads, triton.cdiv(size, 1024))](
                start, summary, factor, nheads, size, segments,
                REVERSE=bool(reverse), HAS_START=start is not None, BLOCK=1024, num_warps=4,
            )  # fmt: skip
        starts = summaries
    launch(starts, last, None)
    return list(zip(at_blocks, last, strict=True))
