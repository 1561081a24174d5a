"""Triton pieces that multiply rows of int8 or int4 codes by a vector as they are, on the tensor cores."""

import triton
import triton.language as tl

from mamba_kernels.decode_norm_triton import inside
from mamba_kernels.state_codes_triton import INT4


@triton.jit
def load_bytes(codes_ptr, p, p_in, WORDS: tl.constexpr, BLOCK_W: tl.constexpr):
    byte = tl.arange(0, 4 * BLOCK_W)
    byte_in = p_in[:, None] & inside(byte, 4 * WORDS, 4 * BLOCK_W)[None, :]
    bytes_ptr = codes_ptr.to(tl.pointer_type(tl.int8), bitcast=True)
    return tl.load(bytes_ptr + (p * (4 * WORDS))[:, None] + byte[None, :], mask=byte_in, other=0)


@triton.jit
def integer_dot(
    codes, C_ptr, columns, KIND: tl.constexpr, WORDS: tl.constexpr, D_STATE: tl.constexpr,
    BLOCK_W: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Sum rows of int8 or int4 codes, bytes (P, 4 * BLOCK_W) in int8, times C (and the columns' factors).

    C as an integer of 29 bits, in 4 parts of 7 and the sign, goes through the tensor cores beside the codes
    as they are: a fifth of the instructions of converting each code, and exact.
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
    top = tl.maximum(top, 1e-30)
    unit = 268435200.0 / top  # just below 2^28
    shift = 7 * part[None, :]
    if KIND == INT4:
        lower, upper = nibbles(codes, INTERPRET)
        sums = tl.dot(lower, _parts(even * unit, part), out_dtype=tl.int32)
        sums = tl.dot(upper, _parts(odd * unit, part), sums, out_dtype=tl.int32)
        unit *= 16.0
    else:
        sums = tl.dot(codes, _parts(even * unit, part), out_dtype=tl.int32)
    return tl.sum(sums.to(tl.float32) * (1 << shift).to(tl.float32), axis=1) / unit


@triton.jit
def _parts(C, part):
    """C (K,), below 2^28, as int8 (K, 4): 7 bits each from the lowest up, the last with the sign."""
    parts = C.to(tl.int32)[:, None] >> 7 * part[None, :]
    return tl.where(part[None, :] < 3, parts & 127, parts).to(tl.int8)


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
def _load_at(C_ptr, columns, w, field, WORDS: tl.constexpr, D_STATE: tl.constexpr):
    """C, times the columns' factors, where fields of words w keep their state; zero past the end."""
    at = field * WORDS + w
    column_in = (w < WORDS) & (at < D_STATE)
    C = tl.load(C_ptr + at, mask=column_in, other=0.0).to(tl.float32)
    if columns is not None:
        C *= tl.load(columns + at, mask=column_in, other=0.0)
    return C
