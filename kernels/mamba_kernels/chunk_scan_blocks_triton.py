"""How the SSD kernels cut rows into blocks, find their place, and choose the size of what they hold.

A row is one sequence: an entry of the batch, or with cu_seqlens a part of the one packed entry. Its blocks
of BLOCK tokens start at its first token; the last one may be cut short. Blocks of all rows are numbered
through, and what belongs to a block is stored by that number.
"""

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from mamba_kernels.backend import interpreting

# Arguments that count: whether one is a multiple of 16 is no reason to compile a kernel again.
COUNTS = [
    "rows", "seqlen", "row_blocks", "blocks", "segments", "ptiles",
    "nheads", "group_heads", "program_heads",
]  # fmt: skip


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
    offsets = F.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
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


def largest_block(headdim: int) -> int:
    """The longest block for heads so wide.

    Products of 64 rows and more run on wgmma. Where a tile of few columns cannot be loaded ahead, because
    its rows are not aligned, it can lie where an earlier operand lay, and then ptxas 12.8 (Triton 3.6)
    builds a descriptor of it from a register that it never set. Products of 32 rows have no descriptors.
    """
    return 32 if headdim <= 32 else 128


def pad_to_dot(size: int) -> int:
    """The side of a tile that holds `size`: a power of two, and at least 16, which tl.dot asks for."""
    return max(16, triton.next_power_of_2(size))


def resident(shared_memory: int, limits: Limits) -> int:
    """How many programs of so much shared memory run at a time; registers allow two a processor."""
    return limits.processors * max(1, min(2, limits.shared_memory // shared_memory))


def choose_segments(row_blocks: int, programs: int, processors: int, slots: int) -> int:
    """How many segments to walk a row in: `programs` are what one segment has, `slots` run at a time.

    Segments read x and B a second time, so they pay only where most processors would be idle; there, the
    fewest blocks one after the other. The launches more and the chaining of the segments' states cost
    about as much as 6 blocks and half a block a segment (on an H200).
    """
    if 2 * programs > processors:
        return 1
    return min(
        range(1, max(min(slots // max(programs, 1), row_blocks), 1) + 1),
        key=lambda n: 2 * triton.cdiv(row_blocks, n) + 6 + n / 2 if n > 1 else row_blocks,
    )


def choose_heads(blocks: int, group_heads: int, slots: int) -> int:
    """How many heads of a group a program takes, where `blocks` programs share the group's B and C.

    The fewest rounds of the `slots` programs that run at a time, each as long as its heads and what a
    program does before them, which costs about as much as two heads. Programs of one round do not take
    the same time: the last term is what the longest of them wastes (both fitted to an H200).
    """
    return min(
        range(group_heads, 0, -1),
        key=lambda heads: (
            triton.cdiv(blocks * triton.cdiv(group_heads, heads), slots) * (heads + 2) + heads / 16
        ),
    )
