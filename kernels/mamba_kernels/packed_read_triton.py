"""Triton pieces that read rows of a head of a packed state: their codes, and C times them."""

import triton
import triton.language as tl

from mamba_kernels.packed_products_triton import (
    CHUNK,
    LIVE,
    PARTS,
    as_operand,
    load_chunk,
    load_parts,
    sum_parts,
)
from mamba_kernels.packed_rows_triton import load_columns, load_words
from mamba_kernels.state_codes_triton import (
    BF16,
    FP8,
    FP16,
    INT8,
    decode,
    decoded_unit,
    is_integer,
    is_scaled,
    per_word,
)


@triton.jit
def load_codes(
    codes_ptr, p, p_in, KIND: tl.constexpr, AS_LOADED: tl.constexpr, D_STATE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The words of rows p of a head, in the tiles in which `multiply` takes them."""
    FIELDS: tl.constexpr = per_word(KIND)
    WORDS: tl.constexpr = (D_STATE + FIELDS - 1) // FIELDS
    BLOCK_W: tl.constexpr = BLOCK_N // FIELDS
    codes = ()
    if AS_LOADED:
        for chunk in tl.static_range(WORDS * 4 // CHUNK):
            codes += (load_chunk(codes_ptr, chunk, p, p_in, WORDS),)
    else:
        codes += (load_words(codes_ptr, p, p_in, tl.arange(0, BLOCK_W), WORDS, BLOCK_W),)
    return codes


@triton.jit
def multiply(
    codes, C_ptr, columns, parts_ptr, halves_ptr, bfloats_ptr, unit_ptr, group_row,
    KIND: tl.constexpr, AS_LOADED: tl.constexpr, D_STATE: tl.constexpr, BLOCK_N: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """C times the rows of `load_codes`, in units of their scales; return (P,).

    C_ptr: the group's. columns: the head's factors, or None. AS_LOADED: C comes from `packed_prepare_triton`,
    whose `Common` the other pointers are, of which row group_row is the group's.
    """
    FIELDS: tl.constexpr = per_word(KIND)
    WORDS: tl.constexpr = (D_STATE + FIELDS - 1) // FIELDS
    BLOCK_W: tl.constexpr = BLOCK_N // FIELDS
    P: tl.constexpr = codes[0].shape[0]
    if not AS_LOADED:
        return _multiply_decoded(codes[0], C_ptr, columns, KIND, D_STATE, BLOCK_W)
    elif is_integer(KIND):
        parts_ptr += group_row * (3 * LIVE * D_STATE)
        sums = tl.zeros((P, PARTS), tl.int32)
        for chunk in tl.static_range(WORDS * 4 // CHUNK):
            numbers = as_operand(codes[chunk], KIND, INTERPRET)
            for half in tl.static_range(len(numbers)):
                own_ptr = parts_ptr + (half if KIND == INT8 else 1 + half) * (LIVE * D_STATE)
                C_parts = load_parts(own_ptr, chunk, D_STATE // 4, INT8, INTERPRET)
                sums = tl.dot(numbers[half], C_parts, sums, out_dtype=tl.int32)
        # The halves of bytes are 16 times int4 codes.
        return sum_parts(sums, 7) * (tl.load(unit_ptr + 2 * group_row) * (1.0 if KIND == INT8 else 1 / 16))
    else:
        # fp8 codes are multiplied as float16.
        ELEMENT: tl.constexpr = BF16 if KIND == BF16 else FP16
        if KIND == BF16:
            parts_ptr = bfloats_ptr + group_row * (LIVE * D_STATE)
        else:
            parts_ptr = halves_ptr + (group_row * 2 + (1 if KIND == FP8 else 0)) * (LIVE * D_STATE)
        sums = tl.zeros((P, PARTS), tl.float32)
        for chunk in tl.static_range(WORDS * 4 // CHUNK):
            numbers = as_operand(codes[chunk], KIND, INTERPRET)
            for half in tl.static_range(len(numbers)):
                place = chunk * len(numbers) + half
                C_parts = load_parts(parts_ptr, place, D_STATE // 2, ELEMENT, INTERPRET)
                sums = tl.dot(numbers[half], C_parts, sums)
        if KIND == BF16:
            return sum_parts(sums, 0)
        else:
            return sum_parts(sums, -11) * tl.load(unit_ptr + 2 * group_row + 1)


@triton.jit
def _multiply_decoded(
    words, C_ptr, columns, KIND: tl.constexpr, D_STATE: tl.constexpr, BLOCK_W: tl.constexpr
):
    FIELDS: tl.constexpr = per_word(KIND)
    WORDS: tl.constexpr = (D_STATE + FIELDS - 1) // FIELDS
    w = tl.arange(0, BLOCK_W)
    fields = decode(words, KIND)
    products = tl.zeros(words.shape, tl.float32)
    for field in tl.static_range(FIELDS):
        C = load_columns(C_ptr, w, field, WORDS, D_STATE, BLOCK_W)
        if columns is not None and is_scaled(KIND):
            C *= load_columns(columns, w, field, WORDS, D_STATE, BLOCK_W)
        products += fields[field] * C[None, :]
    return tl.sum(products, axis=1) * decoded_unit(KIND)
