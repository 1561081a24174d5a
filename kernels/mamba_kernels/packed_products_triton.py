"""Triton pieces that multiply rows of codes by C on the tensor cores, as they are: none is decoded.

C goes in as a few parts of the codes' own type, which cost nothing, as a product has columns for eight:
beside integer codes as 29 bits in four int8, beside float16 and bfloat16 as three of those. fp8 codes become
float16 for it, two in an instruction. The products with the parts are added in float32.

That is so where rows are whole chunks, and the same C serves all heads: `packed_prepare_triton` makes its
parts.
"""

import triton
import triton.language as tl

from mamba_kernels.state_codes_triton import BF16, FP8, FP16, INT4, INT8

# Bytes of a row in a chunk: an operand's row is shared by 4 lanes, and a lane loads 16 bytes at once.
CHUNK = tl.constexpr(64)
# C's parts, four of an integer and three of other numbers, and the columns that they are padded to with
# zeros, the least of a product on the tensor cores.
LIVE = tl.constexpr(4)
PARTS = tl.constexpr(8)
# C is an integer below 2^28, less what dividing by the unit in float32 could round up to it.
LARGEST = tl.constexpr(268435200.0)
# The unit of a C of zeros, which must not be zero.
SMALLEST = tl.constexpr(1e-30)


@triton.jit
def load_chunk(codes_ptr, chunk, p, p_in, WORDS: tl.constexpr):
    """Words (P, 16): those of a chunk of rows p of codes, WORDS each."""
    ptrs = codes_ptr + (p * WORDS)[:, None] + (chunk * 16 + tl.arange(0, 16))[None, :]
    return tl.load(ptrs, mask=p_in[:, None], other=0, volatile=True)


@triton.jit
def as_operand(words, KIND: tl.constexpr, INTERPRET: tl.constexpr):
    """A chunk (P, 16) as numbers in the order in which the 4 lanes of a row have them as an operand.

    A product takes two registers of each of the 4 lanes at a time, and a lane has loaded 4 words that are
    neighbours: so nothing moves to another lane.

    Returns:
        A tuple of int8 (P, 64), of float16 or bfloat16 (P, 32), for fp8 of two float16 (P, 32), of each
        lane's first and second words, and for int4 of two int8 (P, 64), 16 times the lower and the upper
        halves of the bytes.
    """
    if INTERPRET:
        return _as_operand_interpreted(words, KIND)
    elif KIND == INT8:
        a, b, c, d = tl.inline_asm_elementwise(
            "mov.b32 $0, $4; mov.b32 $1, $5; mov.b32 $2, $6; mov.b32 $3, $7;",
            "=r,=r,=r,=r,r,r,r,r", [words], dtype=(tl.int8, tl.int8, tl.int8, tl.int8), is_pure=True, pack=4,
        )  # fmt: skip
        return (_join_bytes(a, b, c, d),)
    elif KIND == INT4:
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            """{ .reg .b32 t;
                 shl.b32 t, $8, 4; and.b32 $0, t, 0xF0F0F0F0; and.b32 $4, $8, 0xF0F0F0F0;
                 shl.b32 t, $9, 4; and.b32 $1, t, 0xF0F0F0F0; and.b32 $5, $9, 0xF0F0F0F0;
                 shl.b32 t, $10, 4; and.b32 $2, t, 0xF0F0F0F0; and.b32 $6, $10, 0xF0F0F0F0;
                 shl.b32 t, $11, 4; and.b32 $3, t, 0xF0F0F0F0; and.b32 $7, $11, 0xF0F0F0F0; }""",
            "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r", [words],
            dtype=(tl.int8, tl.int8, tl.int8, tl.int8, tl.int8, tl.int8, tl.int8, tl.int8), is_pure=True,
            pack=4,
        )  # fmt: skip
        return _join_bytes(a, b, c, d), _join_bytes(e, f, g, h)
    elif KIND == FP8:
        a, b, c, d = tl.inline_asm_elementwise(
            """{ .reg .b16 t, u;
                 mov.b32 {t, u}, $8; cvt.rn.f16x2.e4m3x2 $0, t; cvt.rn.f16x2.e4m3x2 $1, u;
                 mov.b32 {t, u}, $9; cvt.rn.f16x2.e4m3x2 $2, t; cvt.rn.f16x2.e4m3x2 $3, u;
                 mov.b32 {t, u}, $10; cvt.rn.f16x2.e4m3x2 $4, t; cvt.rn.f16x2.e4m3x2 $5, u;
                 mov.b32 {t, u}, $11; cvt.rn.f16x2.e4m3x2 $6, t; cvt.rn.f16x2.e4m3x2 $7, u; }""",
            "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r", [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=4,
        )  # fmt: skip
        return _join_pairs(a, b), _join_pairs(c, d)
    elif KIND == FP16:
        a, b = tl.inline_asm_elementwise(
            "mov.b32 $0, $4; mov.b32 $1, $5; mov.b32 $2, $6; mov.b32 $3, $7;",
            "=r,=r,=r,=r,r,r,r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=4,
        )  # fmt: skip
        return (_join_pairs(a, b),)
    else:
        a, b = tl.inline_asm_elementwise(
            "mov.b32 $0, $4; mov.b32 $1, $5; mov.b32 $2, $6; mov.b32 $3, $7;",
            "=r,=r,=r,=r,r,r,r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
        )  # fmt: skip
        return (_join_pairs(a, b),)


@triton.jit
def _join_bytes(a, b, c, d):
    """The bytes of each lane's first, second, ... words (P, 16) as (P, 64)."""
    words = tl.reshape(tl.join(tl.join(a, b), tl.join(c, d)), (a.shape[0], 4, 4, 2, 2))
    return tl.reshape(tl.permute(words, (0, 4, 1, 3, 2)), (a.shape[0], 64))


@triton.jit
def _join_pairs(a, b):
    """The numbers of 16 bits in each lane's first and in its second four (P, 16) as (P, 32)."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (a.shape[0], 32))


@triton.jit
def _as_operand_interpreted(words, KIND: tl.constexpr):
    if KIND == FP16 or KIND == BF16:
        numbers = (tl.expand_dims(words, 2) >> tl.reshape(16 * tl.arange(0, 2), (1, 1, 2))).to(tl.int16)
        numbers = numbers.to(tl.float16 if KIND == FP16 else tl.bfloat16, bitcast=True).to(tl.float32)
        return (_in_order(numbers, 4),)
    numbers = (tl.expand_dims(words, 2) >> tl.reshape(8 * tl.arange(0, 4), (1, 1, 4))).to(tl.int8)
    if KIND == INT4:
        return _in_order(numbers << 4, 8), _in_order(numbers & -16, 8)
    elif KIND == FP8:
        # As float16 the same exponent and mantissa are 2^-8 of the number.
        bits = (numbers & 0x7F).to(tl.int16) << 7 | (numbers & -128).to(tl.int16) << 8
        halves = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        halves = tl.permute(tl.reshape(halves, (words.shape[0], 4, 2, 2, 4)), (0, 1, 3, 4, 2))
        first, second = tl.split(tl.reshape(halves, (words.shape[0], 16, 2, 2)))
        return _in_order(first, 4), _in_order(second, 4)
    else:
        return (_in_order(numbers, 8),)


@triton.jit
def _in_order(numbers, AT_A_TIME: tl.constexpr):
    """The numbers of a chunk (P, 16, numbers in a word) as `as_operand` has them."""
    P: tl.constexpr = numbers.shape[0]
    SIZE: tl.constexpr = 16 * numbers.shape[2]
    registers = tl.reshape(numbers, (P, 4, SIZE // (4 * AT_A_TIME), AT_A_TIME))
    return tl.reshape(tl.permute(registers, (0, 2, 1, 3)), (P, SIZE))


@triton.jit
def load_parts(parts_ptr, chunk, ROW: tl.constexpr, KIND: tl.constexpr, INTERPRET: tl.constexpr):
    """C's parts beside a chunk of codes that are multiplied as KIND, int8, fp16 or bf16: (64 or 32, PARTS).

    parts_ptr: (LIVE, ROW words), each row in the order of codes in memory, so that parts are put into an
    operand's order as codes are.
    """
    part = tl.arange(0, PARTS)
    rows = parts_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + (part * ROW)[:, None]
    words = tl.load(rows + (chunk * 16 + tl.arange(0, 16))[None, :], mask=(part < LIVE)[:, None], other=0)
    return tl.trans(as_operand(words, KIND, INTERPRET)[0])


@triton.jit
def sum_parts(sums, BITS: tl.constexpr):
    """The products with C from those with its parts (P, PARTS): each is 2^BITS of the one before."""
    part = tl.arange(0, PARTS)
    return tl.sum(sums.to(tl.float32) * tl.exp2((BITS * part).to(tl.float32))[None, :], axis=1)
