"""Triton piece that reads rows of a head of a packed state at a token at which it does not fold."""

import triton
import triton.language as tl

from mamba_kernels.decode_norm_triton import inside, wait_for_previous
from mamba_kernels.packed_output_triton import finish, load_gate, store_squares
from mamba_kernels.packed_products_triton import (
    PARTS,
    as_operand,
    integer_dot,
    load_bytes,
    load_chunk,
    load_half_chunk,
    load_parts,
    nibbles,
    sum_parts,
)
from mamba_kernels.packed_window_triton import load_columns, load_scale, load_words
from mamba_kernels.state_codes_triton import (
    FP16,
    INT4,
    INT8,
    decode,
    decoded_unit,
    is_integer,
    is_scaled,
    per_word,
)


@triton.jit
def read_rows(
    zxbcdt_ptr, codes_ptr, scales_ptr, past_x_ptr, position_ptr, columns_ptr, D_ptr, norm_weight_ptr,
    scaled_ptr, squares_ptr, weights_ptr, parts_ptr, halves_ptr, unit_ptr,
    stride_in, stride_scales, stride_x, stride_D_head, stride_scaled, stride_squares,
    tile, head, batch, slot,
    KIND: tl.constexpr, NHEADS: tl.constexpr, HEADDIM: tl.constexpr, D_STATE: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr, WINDOW: tl.constexpr, AS_LOADED: tl.constexpr, D_P: tl.constexpr,
    GATE: tl.constexpr, NORM: tl.constexpr, SQUARES: tl.constexpr, BLOCK_P: tl.constexpr,
    FOLD_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_AGE: tl.constexpr, PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """Tile `tile` of BLOCK_P rows of a head of format KIND: its codes, at codes_ptr, are only read.

    y = decay C stored + sum over the window of weight_i x_i + (D + weight_now) x, with the decay and the
    weights of `packed_prepare_triton`. AS_LOADED: C comes from there too, for codes that are multiplied in
    the order they are loaded in. SQUARES: the parts of the sum of squares of a head.
    """
    FIELDS: tl.constexpr = per_word(KIND)
    WORDS: tl.constexpr = (D_STATE + FIELDS - 1) // FIELDS
    BLOCK_W: tl.constexpr = BLOCK_N // FIELDS
    GROUPS: tl.constexpr = NHEADS // HEADS_PER_GROUP
    D_SSM: tl.constexpr = NHEADS * HEADDIM
    CHUNKS: tl.constexpr = WORDS // 16  # whole ones where AS_LOADED
    INTEGER: tl.constexpr = is_integer(KIND) and BLOCK_W >= 8  # tl.dot takes no fewer bytes than 32
    group = head // HEADS_PER_GROUP
    w = tl.arange(0, BLOCK_W)
    p = tile * BLOCK_P + tl.arange(0, BLOCK_P)
    p_in = inside(p, HEADDIM, BLOCK_P)
    # All that no kernel of this token writes, before it is known whether the head folds. Volatile loads stay
    # in order, ahead of all that waits for one of them: else the compiler has them wait for each other.
    position = tl.load(position_ptr + slot, volatile=True)
    scale = load_scale(scales_ptr + slot * stride_scales + head * HEADDIM, p, p_in, KIND)
    chunks = ()
    if AS_LOADED:
        for chunk in tl.static_range(CHUNKS):
            if KIND == FP16:
                chunks += (load_half_chunk(codes_ptr, chunk, p, p_in, D_STATE),)
            else:
                chunks += (load_chunk(codes_ptr, chunk, p, p_in, 4 * WORDS),)
    elif INTEGER:
        codes = load_bytes(codes_ptr, p, p_in, WORDS, BLOCK_W)
    else:
        codes = load_words(codes_ptr, p, p_in, w, WORDS, BLOCK_W)
    past_x_ptr += slot * stride_x + head * HEADDIM
    ring = tl.arange(0, BLOCK_AGE)
    ring_in = inside(ring, WINDOW, BLOCK_AGE)
    past_x_ptrs = past_x_ptr + (ring * D_SSM)[:, None] + p[None, :]
    past_x = tl.load(past_x_ptrs, mask=ring_in[:, None] & p_in[None, :], other=0.0, volatile=True)
    D = tl.load(D_ptr + head * stride_D_head + p * D_P, mask=p_in, other=0.0).to(tl.float32)
    norm_weight = D
    if NORM != "none":
        norm_weight = tl.load(norm_weight_ptr + head * HEADDIM + p, mask=p_in, other=0.0)
    if (position + head) % WINDOW == WINDOW - 1:
        return
    now = position % WINDOW
    weights_ptr += (slot * NHEADS + head) * (1 + WINDOW)

    wait_for_previous(PDL)
    z_ptr = zxbcdt_ptr + batch * stride_in + head * HEADDIM
    x_now = tl.load(z_ptr + D_SSM + p, mask=p_in, other=0.0)
    z = load_gate(z_ptr, p, p_in, GATE)
    decay = tl.load(weights_ptr)
    weight_now = tl.load(weights_ptr + 1 + now)
    weight = tl.load(weights_ptr + 1 + ring, mask=ring_in & (ring != now), other=0.0)
    unit_ptr += (slot * GROUPS + group) * 2
    if AS_LOADED and KIND == FP16:
        halves_ptr += (slot * GROUPS + group) * (PARTS * D_STATE)
        sums = tl.zeros((BLOCK_P, PARTS), tl.float32)
        for chunk in tl.static_range(CHUNKS - 1, -1, -1):  # the one that was loaded last, first
            halves = as_operand(chunks[chunk], BLOCK_P, 2)
            sums = tl.dot(halves, load_parts(halves_ptr, chunk, D_STATE, 32), sums)
        y = sum_parts(sums, -11) * tl.load(unit_ptr + 1)
    elif AS_LOADED:
        ROW: tl.constexpr = (D_STATE + 3) // 4 * 4
        parts_ptr += (slot * GROUPS + group) * (3 * PARTS * ROW)
        sums = tl.zeros((BLOCK_P, PARTS), tl.int32)
        for chunk in tl.static_range(CHUNKS - 1, -1, -1):  # the one that was loaded last, first
            if KIND == INT8:
                lower = chunks[chunk]
            else:
                lower, upper = nibbles(chunks[chunk], INTERPRET)
                upper = as_operand(upper, BLOCK_P, 4)
                C_parts = load_parts(parts_ptr + 2 * PARTS * ROW, chunk, ROW, 64)
                sums = tl.dot(upper, C_parts, sums, out_dtype=tl.int32)
            lower = as_operand(lower, BLOCK_P, 4)
            C_parts = load_parts(parts_ptr + (0 if KIND == INT8 else PARTS * ROW), chunk, ROW, 64)
            sums = tl.dot(lower, C_parts, sums, out_dtype=tl.int32)
        y = sum_parts(sums, 7) * tl.load(unit_ptr)
        if KIND == INT4:
            y *= 1 / 16  # see `nibbles`
    else:
        C_ptr = zxbcdt_ptr + batch * stride_in + 2 * D_SSM + (GROUPS + group) * D_STATE
        columns = columns_ptr
        if columns_ptr is not None:
            columns = columns_ptr + head * D_STATE
        if INTEGER:
            y = integer_dot(codes, C_ptr, columns, KIND, WORDS, D_STATE, BLOCK_W, INTERPRET)
        else:
            fields = decode(codes, KIND)
            products = tl.zeros((BLOCK_P, BLOCK_W), tl.float32)
            for field in tl.static_range(FIELDS):
                C_part = load_columns(C_ptr, w, field, WORDS, D_STATE, BLOCK_W)
                if columns_ptr is not None and is_scaled(KIND):
                    C_part *= load_columns(columns, w, field, WORDS, D_STATE, BLOCK_W)
                products += fields[field] * C_part[None, :]
            y = tl.sum(products, axis=1) * decoded_unit(KIND)
    y *= scale * decay
    y += tl.sum(past_x.to(tl.float32) * weight[:, None], axis=0) + (D + weight_now) * x_now.to(tl.float32)
    scaled_ptr += batch * stride_scaled + head * HEADDIM
    square = finish(y, z, norm_weight, scaled_ptr, p, p_in, GATE, NORM)
    if NORM != "none":
        parts = squares_ptr + batch * stride_squares + head * SQUARES
        store_squares(parts, tile, square, BLOCK_P // FOLD_P, SQUARES)
    # This token's place in the window is one that no head still reads.
    tl.store(past_x_ptr + now * D_SSM + p, x_now, mask=p_in)
