"""Triton forward of the SSD scan: the output of each block from the state that enters it.

A program takes one block of tokens and a run of heads of one group. B, C and their product, which the
heads share, are read and multiplied once; the loop over heads then reads only what is the head's own.
"""

from dataclasses import dataclass

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
from mamba_kernels.chunk_scan_states_triton import Walk, launch_decays, launch_states


@triton.jit(do_not_specialize=COUNTS)
def _output_kernel(
    x, B, C, D, z, y, steps, decays, entering, runs,
    nheads, group_heads, headdim, d_state, program_heads,
    rows, seqlen, row_blocks, cu_seqlens, block_offsets, block_rows,
    stride_x_b, stride_x_l, stride_x_h, stride_x_p,
    stride_B_b, stride_B_l, stride_B_g, stride_B_n,
    stride_C_b, stride_C_l, stride_C_g, stride_C_n,
    stride_D_h, stride_D_p,
    stride_z_b, stride_z_l, stride_z_h, stride_z_p,
    stride_y_b, stride_y_l, stride_y_h, stride_y_p,
    stride_runs_b,
    HAS_D: tl.constexpr, HAS_Z: tl.constexpr, HAS_RUNS: tl.constexpr, VARLEN: tl.constexpr,
    DOT: tl.constexpr, OFFSET: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """y[i] = exp(a[i]) C[i] H + sum over j <= i of exp(a[i] - a[j]) dt[j] (C[i] . B[j]) x[j] + D x[i]."""
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
    y += batch * stride_y_b + start * stride_y_l

    c = load_tile(C, i, stride_C_l, left, n, stride_C_n, d_state).to(DOT)
    bt = load_tile(B, n, stride_B_n, d_state, i, stride_B_l, left).to(DOT)
    seen = i[:, None] >= i[None, :]
    if HAS_RUNS:
        runs += batch * stride_runs_b + begin
        run = load_run(runs, i, left)
        before = tl.load(runs - tl.minimum(begin, 1))
        seen = seen & (run[:, None] == load_run(runs, i, left)[None, :])
    scores = tl.where(seen, tl.dot(c, bt, input_precision="ieee"), 0.0)

    head0 = group * group_heads + part * program_heads
    heads = tl.minimum(program_heads, group_heads - part * program_heads)
    for head in range(head0, head0 + heads):
        number = block * nheads + head
        state = load_tile(entering + number * d_state * headdim, n, headdim, d_state, p, 1, headdim)
        xk = load_tile(x + head * stride_x_h, i, stride_x_l, left, p, stride_x_p, headdim)
        a = tl.load(decays + number * BLOCK + i)
        dt = tl.load(steps + number * BLOCK + i)
        into = tl.exp2(a)
        if HAS_RUNS:
            into = tl.where(run == before, into, 0.0)
        # Above the diagonal the scores are 0 and the exponent, positive there, is cut to 0.
        weights = scores * tl.exp2(tl.minimum(a[:, None] - a[None, :], 0.0)) * dt[None, :]
        acc = tl.dot(c, state, input_precision="ieee") * into[:, None]
        acc = tl.dot(weights.to(DOT), xk.to(DOT), acc=acc, input_precision="ieee")
        if HAS_D:
            d = tl.load(D + head * stride_D_h + p * stride_D_p, mask=p < headdim, other=0.0)
            acc += xk.to(tl.float32) * d.to(tl.float32)[None, :]
        if HAS_Z:
            zk = load_tile(z + head * stride_z_h, i, stride_z_l, left, p, stride_z_p, headdim)
            zk = zk.to(tl.float32)
            acc *= zk * tl.sigmoid(zk)
        ptrs = y + head * stride_y_h + i[:, None] * stride_y_l + p[None, :] * stride_y_p
        tl.store(ptrs, acc.to(y.dtype.element_ty), mask=(i[:, None] < left) & (p[None, :] < headdim))


@dataclass(frozen=True)
class Tiles:
    """Sizes of the kernels: (BLOCK_P, num_warps, num_stages) of the states and of the output kernel."""

    block: int
    states: tuple[int, int, int]
    output: tuple[int, int, int]


# Blocks of 128 tokens hand half as many states on, but their programs fill a multiprocessor each: they
# pay where the walk has no need of segments and each program has this many heads to work through.
LONG = Tiles(128, (64, 4, 3), (64, 8, 4))
LONG_HEADS = 8
# Best for rows walked in segments.
SEGMENTED = Tiles(64, (64, 8, 4), (64, 4, 3))
TILES_16_BIT = (
    LONG,
    SEGMENTED,
    Tiles(64, (32, 4, 4), (64, 4, 3)),
    Tiles(64, (64, 4, 2), (64, 4, 2)),
    Tiles(64, (32, 4, 2), (32, 4, 2)),
    Tiles(32, (32, 4, 2), (32, 4, 2)),
    Tiles(16, (16, 4, 1), (16, 4, 1)),
)
# IEEE products run on the scalar units, with whole rows of both operands in registers.
TILES_32_BIT = (
    Tiles(32, (32, 8, 1), (32, 8, 1)),
    Tiles(16, (16, 4, 1), (16, 4, 1)),
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
    """Choose the blocks of a forward: the first tiles of the list that suit the shape and fit the card."""
    size, block_n, padded = dtype.itemsize, pad_to_dot(d_state), pad_to_dot(headdim)
    for tiles in TILES_32_BIT if size == 4 else TILES_16_BIT:
        block = min(tiles.block, largest_block(headdim), pad_to_dot(seqlen))
        states_p, states_warps, states_stages = tiles.states
        output_p, output_warps, output_stages = tiles.output
        states_p, output_p = min(states_p, padded), min(output_p, padded)
        # What is loaded ahead, once a stage: B and x; the state and x, beside C that stays.
        states_bytes = max(states_stages, 2) * block * (block_n + states_p) * size
        output_bytes = (block * block_n + max(output_stages, 2) * (block_n + block) * output_p) * size
        row_blocks = triton.cdiv(seqlen, block)
        walks = rows * nheads * triton.cdiv(headdim, states_p)
        segments = choose_segments(row_blocks, walks, limits.processors, resident(states_bytes, limits))
        if tiles is LONG:
            heads = rows * row_blocks * nheads // limits.processors
            suits = block == LONG.block and 2 * walks > limits.processors and heads >= LONG_HEADS
        else:
            suits = tiles is not SEGMENTED or segments > 1
        if suits and max(states_bytes, output_bytes) + 4096 <= limits.shared_memory:
            break
    else:
        raise too_large(d_state, dtype, limits)
    blocks = rows * row_blocks * triton.cdiv(headdim, output_p) * ngroups
    heads = choose_heads(blocks, nheads // ngroups, resident(output_bytes, limits))
    return {
        "BLOCK": block,
        "states": {
            "BLOCK_P": states_p, "segments": segments, "num_warps": states_warps, "num_stages": states_stages,
        },
        # A program loads no further ahead than it has heads.
        "output": {
            "BLOCK_P": output_p, "heads": heads, "num_warps": output_warps,
            "num_stages": min(output_stages, heads + 1),
        },
    }  # fmt: skip


def launch_forward(
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y, as x, and each row's last state (rows, nheads, headdim, d_state) fp32.

    initial_states: (rows, nheads, headdim, d_state) fp32, contiguous; a row is an entry of the batch, or
    with cu_seqlens one of its sequences. runs: (batch, seqlen) int32, contiguous. The rest is as in
    `mamba_chunk_scan_combined`; x, dt, B, C and z may be views of any strides.
    """
    batch, seqlen, nheads, headdim = x.shape
    ngroups, d_state = B.shape[2:]
    dtype = dot_dtype(x, B, C)
    rows = batch if cu_seqlens is None else cu_seqlens.numel() - 1
    if config is None:
        config = config_for(rows, seqlen, nheads, headdim, ngroups, d_state, dtype, device_limits(x.device))
    packing = pack(batch, seqlen, cu_seqlens, config["BLOCK"])
    steps, decays = launch_decays(dt, A, dt_bias, dt_softplus, dt_limit, packing)
    # A packed entry may have tokens outside every sequence; the blocks cover all others.
    empty = torch.empty if cu_seqlens is None else torch.zeros
    y = empty(x.shape, dtype=x.dtype, device=x.device)
    walks = [Walk(x, B, None, initial_states)]
    [(entering, last)] = launch_states(walks, steps, decays, runs, packing, config["states"], dtype)
    if not packing.blocks:
        return y, last
    output = config["output"]
    group_heads = nheads // ngroups
    parts = ngroups * triton.cdiv(group_heads, output["heads"]) * triton.cdiv(headdim, output["BLOCK_P"])
    _output_kernel[(packing.blocks, parts)](
        x, B, C, D, z if z is not None else x, y, steps, decays, entering, runs if runs is not None else x,
        nheads, group_heads, headdim, d_state, output["heads"],
        *packing.args,
        *x.stride(), *B.stride(), *C.stride(),
        *((*D.stride(), 0)[:2] if D is not None else (0, 0)),
        *strides(z, 4), *y.stride(), runs.stride(0) if runs is not None else 0,
        HAS_D=D is not None, HAS_Z=z is not None, HAS_RUNS=runs is not None,
        VARLEN=cu_seqlens is not None, DOT=tl_dtype(dtype),
        OFFSET=offset_dtype(packing.block, x, B, C, z, y), BLOCK=packing.block,
        BLOCK_N=pad_to_dot(d_state), BLOCK_P=output["BLOCK_P"],
        num_warps=output["num_warps"], num_stages=output["num_stages"],
    )  # fmt: skip
    return y, last
