"""Triton pieces that multiply rows of codes by C on the tensor cores, as they are: none is decoded.

C goes in as a few parts of the codes' own type, which cost nothing, as a product has columns for eight:
beside integer codes as 29 bits in four int8, beside float16 as three float16. The products with the parts
are added in float32.

Where rows are whole chunks (and the same C serves all heads) the codes are multiplied in the order that they
were loaded in, with parts that a kernel before has put into that order (`packed_prepare_triton`). Else
`integer_dot` makes the parts itself.
"""

import triton
import triton.language as tl

from mamba_kernels.decode_norm_triton import inside
from mamba_kernels.state_codes_triton import INT4

# Bytes of a row in a chunk: an operand's row is shared by 4 lanes, and a lane loads 16 bytes at once.
CHUNK = 64
# Columns that C's parts are padded to with zeros, the least of a product on the tensor cores.
PARTS = tl.constexpr(8)
# C is an integer below 2^28, less what dividing by the unit in float32 could round up to it.
LARGEST = tl.constexpr(268435200.0)
# The unit of a C of zeros, which must not be zero.
SMALLEST = tl.constexpr(1e-30)


@triton.constexpr_function
def is_among(kind, kinds):
    """Whether bit `kind` of `kinds` is set."""
    return (kinds >> kind) & 1 != 0


@triton.jit
def load_chunk(codes_ptr, chunk, p, p_in, ROW: tl.constexpr):
    """Bytes (P, 64) in int8: those of a chunk of rows p of int8 or int4 codes, ROW bytes each."""
    byte = tl.arange(0, 64)
    bytes_ptr = codes_ptr.to(tl.pointer_type(tl.int8), bitcast=True)
    ptrs = bytes_ptr + (p * ROW)[:, None] + (chunk * 64 + byte)[None, :]
    return tl.load(ptrs, mask=p_in[:, None], other=0, volatile=True)


@triton.jit
def load_half_chunk(codes_ptr, chunk, p, p_in, D_STATE: tl.constexpr):
    """float16 (P, 32): those of a chunk of rows p of float16 codes."""
    ptrs = codes_ptr.to(tl.pointer_type(tl.float16), bitcast=True) + (p * D_STATE)[:, None]
    ptrs += (chunk * 32 + tl.arange(0, 32))[None, :]
    return tl.load(ptrs, mask=p_in[:, None], other=0.0, volatile=True)


@triton.jit
def as_operand(codes, P: tl.constexpr, PER_WORD: tl.constexpr):
    """A chunk (P, 16 PER_WORD) in the order in which the 4 lanes of a row have it as an operand.

    A product takes a word of each of the 4 lanes at a time, and a lane has loaded 4 words that are
    neighbours: so no number moves to another lane. PER_WORD: numbers in 32 bits.
    """
    words = tl.reshape(codes, (P, 4, 4, PER_WORD))
    return tl.reshape(tl.permute(words, (0, 2, 1, 3)), (P, 16 * PER_WORD))


@triton.jit
def word_at(place, PER_WORD: tl.constexpr):
    """The word of a row whose numbers are at `place` of the row's chunks after `as_operand`."""
    return place // (16 * PER_WORD) * 16 + place // PER_WORD % 4 * 4 + place // (4 * PER_WORD) % 4


@triton.jit
def load_parts(parts_ptr, chunk, ROW: tl.constexpr, SIZE: tl.constexpr):
    """C's parts (SIZE, PARTS) of a chunk of SIZE numbers, from a (PARTS, ROW) matrix."""
    place = tl.arange(0, SIZE)
    return tl.load(parts_ptr + (chunk * SIZE + place)[:, None] + (tl.arange(0, PARTS) * ROW)[None, :])


@triton.jit
def sum_parts(sums, BITS: tl.constexpr):
    """The products with C from those with its parts (P, PARTS): each is 2^BITS of the one before."""
    part = tl.arange(0, PARTS)
    return tl.sum(sums.to(tl.float32) * tl.exp2((BITS * part).to(tl.float32))[None, :], axis=1)


@triton.jit
def nibbles(codes, INTERPRET: tl.constexpr):
    """16 times the signed numbers in the lower and the upper halves of bytes."""
    if INTERPRET:
        lower, upper = codes << 4, codes & -16
    else:
        lower, upper = tl.inline_asm_elementwise(
            """{ .reg .b32 t;
                 shl.b32 t, $2, 4;
                 and.b32 $0, t, 0xF0F0F0F0;
                 and.b32 $1, $2, 0xF0F0F0F0; }""",
            "=r,=r,r", [codes], dtype=(tl.int8, tl.int8), is_pure=True, pack=4,
        )  # fmt: skip
    return lower, upper


@triton.jit
def load_bytes(codes_ptr, p, p_in, WORDS: tl.constexpr, BLOCK_W: tl.constexpr):
    """Bytes (P, 4 * BLOCK_W) in int8: rows p of int8 or int4 codes, zero past their end."""
    byte = tl.arange(0, 4 * BLOCK_W)
    byte_in = p_in[:, None] & inside(byte, 4 * WORDS, 4 * BLOCK_W)[None, :]
    bytes_ptr = codes_ptr.to(tl.pointer_type(tl.int8), bitcast=True)
    return tl.load(bytes_ptr + (p * (4 * WORDS))[:, None] + byte[None, :], mask=byte_in, other=0)


@triton.jit
def integer_dot(
    codes, C_ptr, columns, KIND: tl.constexpr, WORDS: tl.constexpr, D_STATE: tl.constexpr,
    BLOCK_W: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Sum rows of int8 or int4 codes, bytes (P, 4 * BLOCK_W) of `load_bytes`, times C; return (P,).

    C (D_STATE,), times the columns' factors where there are any, is rounded to 29 bits with the sign; its
    products with the codes are exact, in a fifth of the instructions of converting each code.
    """
    byte = tl.arange(0, 4 * BLOCK_W)
    part = tl.arange(0, 4)
    # int4: field 2k is the lower half of byte k of a word, 2k + 1 the upper.
    field = byte % 4 * (2 if KIND == INT4 else 1)
    even = _load_at(C_ptr, columns, byte // 4, field, WORDS, D_STATE)
    top = tl.max(tl.abs(even), axis=0)
    if KIND == INT4:
        odd = _load_at(C_ptr, columns, byte // 4, field + 1, WORDS, D_STATE)
        top = tl.maximum(top, tl.max(tl.abs(odd), axis=0))
    top = tl.maximum(top, SMALLEST)
    unit = 268435200.0 / top  # LARGEST, which the interpreter does not divide by a tensor
    shift = 7 * part[None, :]
    if KIND == INT4:
        lower, upper = nibbles(codes, INTERPRET)
        sums = tl.dot(lower, _parts(even * unit, part), out_dtype=tl.int32)
        sums = tl.dot(upper, _parts(odd * unit, part), sums, out_dtype=tl.int32)
        unit *= 16.0  # see `nibbles`
    else:
        sums = tl.dot(codes, _parts(even * unit, part), out_dtype=tl.int32)
    return tl.sum(sums.to(tl.float32) * (1 << shift).to(tl.float32), axis=1) / unit


@triton.jit
def _parts(C, part):
    """C (K,), below 2^28, as int8 (K, 4): 7 bits each from the lowest up, the last with the sign."""
    parts = C.to(tl.int32)[:, None] >> 7 * part[None, :]
    return tl.where(part[None, :] < 3, parts & 127, parts).to(tl.int8)


@triton.jit
def _load_at(C_ptr, columns, w, field, WORDS: tl.constexpr, D_STATE: tl.constexpr):
    """C, times the columns' factors, where fields of words w keep their state; zero past the end."""
    at = field * WORDS + w
    column_in = (w < WORDS) & (at < D_STATE)
    C = tl.load(C_ptr + at, mask=column_in, other=0.0).to(tl.float32)
    if columns is not None:
        C *= tl.load(columns + at, mask=column_in, other=0.0)
    return C
