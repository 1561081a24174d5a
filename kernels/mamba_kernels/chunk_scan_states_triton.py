"""Triton kernels that both directions of the SSD scan share: step sizes, and the states between blocks.

The scan cuts each row into blocks of BLOCK tokens. A row is one sequence: an entry of the batch, or with
cu_seqlens a part of the one packed entry; its blocks start at its first token. Blocks of all rows are
numbered through, and what belongs to a block is stored by that number, padded to BLOCK tokens:

    steps    (blocks, nheads, BLOCK) fp32   dt after bias, softplus and limits; 0 past the row's end
    decays   (blocks, nheads, BLOCK) fp32   a = cumsum(dt A) / ln 2 inside the block, so exp(.) is exp2(.)
    entering (blocks, nheads, d_state, headdim)   the state before the block, in the matmuls' dtype

States pass from block to block in registers. A row long enough to leave the GPU idle is cut into
segments, walked at the same time: first each is summarised from a zero state, then the summaries are
chained, then each is walked again from its true start.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from mamba_kernels.backend import interpreting

# Arguments that count: whether one is a multiple of 16 is no reason to compile a kernel again.
COUNTS = [
    "rows", "seqlen", "row_blocks", "blocks", "segments", "ptiles",
    "nheads", "ngroups", "group_heads", "program_heads",
]  # fmt: skip
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True)
class Packing:
    """How rows lie in the batch, and how they are cut into blocks."""

    rows: int
    seqlen: int  # tokens of a row; with cu_seqlens, of the packed entry
    block: int
    cu_seqlens: torch.Tensor | None  # (rows + 1,) int32
    block_offsets: torch.Tensor | None  # (rows + 1,) int32, number of the first block of each row
    block_rows: torch.Tensor | None  # (blocks,) int32, the row of each block; `rows` for a block of none

    @property
    def row_blocks(self) -> int:
        """Blocks of a row; with cu_seqlens, of the longest row there can be."""
        return triton.cdiv(self.seqlen, self.block)

    @property
    def blocks(self) -> int:
        if self.block_rows is not None:
            return self.block_rows.numel()
        return self.rows * self.row_blocks

    @property
    def args(self) -> tuple:
        """What `row_of_block` and `locate` take, in their order."""
        return (self.rows, self.seqlen, self.row_blocks, self.cu_seqlens, self.block_offsets, self.block_rows)


def pack(batch: int, seqlen: int, cu_seqlens: torch.Tensor | None, block: int) -> Packing:
    if cu_seqlens is None:
        return Packing(batch, seqlen, block, None, None, None)
    # On the device throughout: the lengths are never read back. As each row may end in a part of a
    # block, there can be as many blocks beyond seqlen / block as there are rows.
    rows = cu_seqlens.numel() - 1
    counts = (cu_seqlens.diff() + (block - 1)) // block
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    numbers = torch.arange(seqlen // block + rows, device=cu_seqlens.device, dtype=torch.int32)
    block_rows = torch.searchsorted(offsets[1:], numbers, right=True, out_int32=True)
    return Packing(rows, seqlen, block, cu_seqlens.to(torch.int32), offsets, block_rows)


@triton.jit
def row_of_block(block, row_blocks, block_rows, VARLEN: tl.constexpr):
    if VARLEN:
        return tl.load(block_rows + block)
    else:
        return block // row_blocks


@triton.jit
def locate(row, seqlen, row_blocks, cu_seqlens, block_offsets, VARLEN: tl.constexpr):
    """Batch entry, first token, number of tokens, first block and number of blocks of a row."""
    row = row.to(tl.int64)
    if VARLEN:
        start = tl.load(cu_seqlens + row).to(tl.int64)
        length = tl.load(cu_seqlens + row + 1) - start
        first = tl.load(block_offsets + row).to(tl.int64)
        return row * 0, start, length, first, tl.load(block_offsets + row + 1) - first
    else:
        return row, row * 0, seqlen + row * 0, row * row_blocks, row_blocks + row * 0


@triton.jit
def load_tile(base, rows, stride_row, limit_row, cols, stride_col, limit_col):
    """The tile base[rows, cols]; 0 at and past the limits."""
    mask = (rows[:, None] < limit_row) & (cols[None, :] < limit_col)
    return tl.load(base + rows[:, None] * stride_row + cols[None, :] * stride_col, mask=mask, other=0.0)


@triton.jit
def load_run(runs, token, length):
    """Which packed sequence of its row the tokens belong to; -1 past the end."""
    return tl.load(runs + token, mask=token < length, other=-1)


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


@triton.jit(do_not_specialize=COUNTS)
def _states_kernel(
    x, B, z, steps, decays, runs, start_states, entering, end_states, factors,
    nheads, group_heads, headdim, d_state, segments,
    rows, seqlen, row_blocks, cu_seqlens, block_offsets, block_rows,
    stride_x_b, stride_x_l, stride_x_h, stride_x_p,
    stride_B_b, stride_B_l, stride_B_g, stride_B_n,
    stride_z_b, stride_z_l, stride_z_h, stride_z_p,
    stride_runs_b,
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
    for step in range(0, segments):
        segment = step
        if REVERSE:
            segment = segments - 1 - step
        number = (row * segments + segment) * nheads + head
        ptrs = summaries + number * size + offset
        summary = tl.load(ptrs, mask=offset < size, other=0.0)
        factor = tl.load(factors + number)
        tl.store(ptrs, state, mask=offset < size)
        state = state * factor + summary


@dataclass(frozen=True)
class Limits:
    """What a launch may use: bytes of shared memory a program, and how many multiprocessors there are."""

    shared_memory: int
    processors: int


@functools.cache
def device_limits(device: torch.device) -> Limits:
    if device.type != "cuda":
        return Limits(1 << 30, 1)  # the interpreter
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return Limits(properties["max_shared_mem"], properties["multiprocessor_count"])


def too_large(d_state: int, dtype: torch.dtype, limits: Limits) -> ValueError:
    return ValueError(
        f"d_state: expected blocks that fit in {limits.shared_memory} bytes of shared memory,"
        f" got {d_state} in {dtype}"
    )


def dot_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """The dtype of the matrix products' operands: the widest of the tensors'.

    float32 in the interpreter, whose tl.dot multiplies the raw bits of bfloat16 (Triton 3.9).
    """
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return torch.float32 if interpreting() else dtype


def tl_dtype(dtype: torch.dtype) -> tl.dtype:
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]


def offset_dtype(block: int, *tensors: torch.Tensor | None) -> tl.dtype:
    """The dtype of offsets inside a tile of `block` tokens: 32 bits, which halve what a tile's addresses
    cost in registers, unless a stride is so long that they could overflow.

    tensors: (batch, seqlen, heads or groups, size). Where a tile begins is always counted in 64 bits.
    """
    reach = max(block * t.stride(1) + t.shape[3] * t.stride(3) for t in tensors if t is not None)
    return tl.int32 if reach < 2**31 else tl.int64


def strides(tensor: torch.Tensor | None, rank: int) -> tuple[int, ...]:
    return tensor.stride() if tensor is not None else (0,) * rank


def pad_to_dot(size: int) -> int:
    """The side of a tile that holds `size`: a power of two, and at least 16, which tl.dot asks for."""
    return max(16, triton.next_power_of_2(size))


def choose_segments(row_blocks: int, programs: int, processors: int) -> int:
    """How many segments to walk a row in, where `programs` are what one segment has.

    Segments read x and B a second time, so they pay only where most processors would be idle, and not
    where a segment is too short to hide the two launches more.
    """
    if 2 * programs > processors:
        return 1
    return max(1, min(row_blocks // 8, triton.cdiv(2 * processors, programs)))


def choose_heads(blocks: int, group_heads: int, processors: int) -> int:
    """How many heads of a group a program takes, where `blocks` programs share the group's B and C.

    The fewest rounds of all processors, each as long as its heads and what a program does before them,
    which costs about as much as two heads. Where that leaves a choice, more heads: fewer programs.
    """
    return min(
        range(group_heads, 0, -1),
        key=lambda heads: triton.cdiv(blocks * triton.cdiv(group_heads, heads), processors) * (heads + 2),
    )


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


def launch_states(
    x: torch.Tensor,
    B: torch.Tensor,
    z: torch.Tensor | None,
    steps: torch.Tensor,
    decays: torch.Tensor,
    runs: torch.Tensor | None,
    start_states: torch.Tensor | None,
    packing: Packing,
    config: dict,
    dtype: torch.dtype,
    reverse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Walk the blocks of every row; see `_states_kernel` for what x, B and z are in which direction.

    start_states: (rows, nheads, headdim, d_state) fp32, contiguous, or None for zeros. config:
    BLOCK_P, segments, num_warps, num_stages. Returns the state at each block, (blocks, nheads,
    d_state, headdim) in `dtype`, and each row's last, (rows, nheads, headdim, d_state) fp32.
    """
    nheads, headdim = x.shape[2:]
    ngroups, d_state = B.shape[2:]
    rows, segments = packing.rows, config["segments"]
    entering = x.new_empty(packing.blocks, nheads, d_state, headdim, dtype=dtype)
    last = x.new_empty(rows, nheads, headdim, d_state, dtype=torch.float32)
    grid = (rows * segments * nheads * triton.cdiv(headdim, config["BLOCK_P"]),)

    def walk(start: torch.Tensor | None, end: torch.Tensor, factors: torch.Tensor | None) -> None:
        _states_kernel[grid](
            x, B, z if z is not None else x, steps, decays, runs if runs is not None else x,
            start, entering, end, factors,
            nheads, nheads // ngroups, headdim, d_state, segments,
            *packing.args,
            *x.stride(), *B.stride(), *strides(z, 4), runs.stride(0) if runs is not None else 0,
            REVERSE=reverse, WALK=factors is None, HAS_START=start is not None, HAS_Z=z is not None,
            HAS_RUNS=runs is not None, VARLEN=packing.cu_seqlens is not None, DOT=tl_dtype(dtype),
            OFFSET=offset_dtype(packing.block, x, B, z), BLOCK=packing.block, BLOCK_N=pad_to_dot(d_state),
            BLOCK_P=config["BLOCK_P"],
            num_warps=config["num_warps"], num_stages=config["num_stages"],
        )  # fmt: skip

    if segments > 1:
        summaries = last.new_empty(rows, segments, nheads, headdim, d_state)
        factors = last.new_empty(rows, segments, nheads)
        walk(None, summaries, factors)
        size = headdim * d_state
        _chain_kernel[(rows * nheads, triton.cdiv(size, 1024))](
            start_states, summaries, factors, nheads, size, segments,
            REVERSE=reverse, HAS_START=start_states is not None, BLOCK=1024, num_warps=4,
        )  # fmt: skip
        start_states = summaries
    walk(start_states, last, None)
    return entering, last
