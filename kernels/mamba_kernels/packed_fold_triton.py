"""Triton piece that folds a head's window into its stored state, which is rounded then."""

import triton
import triton.language as tl

from mamba_kernels.decode_norm_triton import inside
from mamba_kernels.packed_rows_triton import inverse_columns, load_columns
from mamba_kernels.state_codes_triton import decode, decoded_unit, encode, is_scaled, per_word


@triton.constexpr_function
def ages_of(window):
    """Inputs in a product, which takes no fewer than 16."""
    return max(16, triton.next_power_of_2(window))


@triton.jit
def load_inputs(
    past_x_ptr, B_ptr, factors_ptr, stride_x, stride_B, now, p, p_in,
    KIND: tl.constexpr, D_STATE: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The window of a head: x (P, AGES), B (AGES, numbers of a row of words), and the factors.

    Pointers are the head's, and the group's; stride_x, stride_B: of the window's places. x is zero in this
    token's place, `now`, which holds its B already.
    """
    FIELDS: tl.constexpr = per_word(KIND)
    WORDS: tl.constexpr = (D_STATE + FIELDS - 1) // FIELDS
    BLOCK_W: tl.constexpr = BLOCK_N // FIELDS
    ring = tl.arange(0, ages_of(WINDOW))
    ring_in = ring < WINDOW
    x_ptrs = past_x_ptr + p[:, None] + (ring * stride_x)[None, :]
    x = tl.load(x_ptrs, mask=p_in[:, None] & (ring_in & (ring != now))[None, :], other=0.0)
    number = tl.arange(0, FIELDS * BLOCK_W)
    w = number % BLOCK_W
    column = number // BLOCK_W * WORDS + w
    column_in = inside(w, WORDS, BLOCK_W) & inside(column, D_STATE, FIELDS * BLOCK_W)
    B_ptrs = B_ptr + (ring * stride_B)[:, None] + column[None, :]
    B = tl.load(B_ptrs, mask=ring_in[:, None] & column_in[None, :], other=0.0)
    return x, B, tl.load(factors_ptr + ring, mask=ring_in, other=0.0)


@triton.jit
def fold_rows(
    codes, scale, past_x, B, factors, x_now, decay, now, p, p_in, codes_ptr, scales_ptr, columns, key,
    KIND: tl.constexpr, D_STATE: tl.constexpr, STOCHASTIC: tl.constexpr, BLOCK_N: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """Rows p (P,) of a head of format KIND move on to this token, and are rounded:

        decay stored + sum over the window of factor_i x_i B_i

    codes, scale: what `load_codes` and `load_scale` have of the rows; past_x, B, factors: `load_inputs`.
    x_now: this token's x, of place `now`. Pointers are the head's. key: of the stochastic rounding.
    """
    FIELDS: tl.constexpr = per_word(KIND)
    WORDS: tl.constexpr = (D_STATE + FIELDS - 1) // FIELDS
    BLOCK_W: tl.constexpr = BLOCK_N // FIELDS
    ring = tl.arange(0, factors.shape[0])
    x = tl.where((ring == now)[None, :], x_now[:, None], past_x).to(tl.float32) * factors[None, :]
    inputs = _split_all((_sum_products(_parts(x, past_x.dtype), _as_result(B, BLOCK_W), INTERPRET),), FIELDS)
    tiles = codes
    for _ in tl.static_range(BLOCK_W // codes[0].shape[1] - len(codes)):
        tiles += (tl.zeros_like(codes[0]),)  # of rows of 3 chunks, of which there are 4 in a tile
    fields = decode(_as_result(_join_all(tiles), BLOCK_W), KIND)
    scale *= decay * decoded_unit(KIND)
    w = tl.reshape(_as_result(tl.arange(0, BLOCK_W)[None, :], BLOCK_W), (BLOCK_W,))
    state = ()
    for field in tl.static_range(FIELDS):
        part = fields[field]
        if columns is not None and is_scaled(KIND):
            part *= load_columns(columns, w, field, WORDS, D_STATE, BLOCK_W)[None, :]
        part = part * scale[:, None] + inputs[field]
        if columns is not None and is_scaled(KIND):
            part *= inverse_columns(columns, w, field, WORDS, D_STATE, BLOCK_W)[None, :]
        state += (part,)
    words, scale = encode(state, p, w, key, KIND, WORDS, STOCHASTIC, INTERPRET)
    _store_words(codes_ptr + p * WORDS, _as_loaded(words, BLOCK_W), p_in, WORDS, BLOCK_W)
    if is_scaled(KIND):
        tl.store(scales_ptr + p, scale, mask=p_in)


@triton.jit
def _join_all(tiles):
    """Tiles of neighbouring words (P, W), as many as a power of two, as one."""
    if len(tiles) == 1:
        return tiles[0]
    else:
        pairs = ()
        for i in tl.static_range(len(tiles) // 2):
            pairs += (_join(tiles[2 * i], tiles[2 * i + 1]),)
        return _join_all(pairs)


@triton.jit
def _store_words(row_ptrs, words, p_in, WORDS: tl.constexpr, BLOCK_W: tl.constexpr):
    """Write rows of words (P, BLOCK_W), where they divide into 16 so that 4 lanes write a row."""
    if WORDS < BLOCK_W or WORDS <= 16:
        w = tl.arange(0, BLOCK_W)
        mask = p_in[:, None] & inside(w, WORDS, BLOCK_W)[None, :]
        tl.store(row_ptrs[:, None] + w[None, :], words, mask=mask)
    else:
        HALF: tl.constexpr = WORDS // 2
        first, second = _split(words)
        _store_words(row_ptrs, first, p_in, HALF, HALF)
        _store_words(row_ptrs + HALF, second, p_in, HALF, HALF)


@triton.jit
def _join(first, second):
    """Rows (P, W) and (P, W) as rows (P, 2 W)."""
    P: tl.constexpr = first.shape[0]
    return tl.reshape(tl.permute(tl.join(first, second), (0, 2, 1)), (P, 2 * first.shape[1]))


@triton.jit
def _split(words):
    """The inverse of `_join`."""
    P: tl.constexpr = words.shape[0]
    return tl.split(tl.permute(tl.reshape(words, (P, 2, words.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def _split_all(tiles, COUNT: tl.constexpr):
    """One tile as COUNT tiles of neighbouring columns, a power of two."""
    if len(tiles) == COUNT:
        return tiles
    else:
        halves = ()
        for i in tl.static_range(len(tiles)):
            first, second = _split(tiles[i])
            halves += (first, second)
        return _split_all(halves, COUNT)


@triton.jit
def _as_result(numbers, WORDS: tl.constexpr):
    """Columns of (P, N) in the order in which the 4 lanes of a row have them of a product's result.

    That is two neighbours of each lane at a time, where a lane has loaded 4. WORDS: of a row, in which the
    columns are.
    """
    P: tl.constexpr = numbers.shape[0]
    N: tl.constexpr = numbers.shape[1]
    if WORDS >= 16:
        numbers = tl.permute(tl.reshape(numbers, (P, N // 16, 4, 2, 2)), (0, 1, 3, 2, 4))
    return tl.reshape(numbers, (P, N))


@triton.jit
def _as_loaded(words, WORDS: tl.constexpr):
    """The inverse of `_as_result`."""
    P: tl.constexpr = words.shape[0]
    if WORDS >= 16:
        words = tl.permute(tl.reshape(words, (P, WORDS // 16, 2, 4, 2)), (0, 1, 3, 2, 4))
    return tl.reshape(words, (P, WORDS))


@triton.jit
def _parts(x, element: tl.constexpr):
    """float32 x as what is multiplied on the tensor cores by bfloat16: a sum of three, the smallest first."""
    if element == tl.bfloat16:
        high = x.to(tl.bfloat16)
        rest = x - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        return (rest - middle.to(tl.float32)).to(tl.bfloat16), middle, high
    else:
        return (x,)


@triton.jit
def _sum_products(parts, B, INTERPRET: tl.constexpr):
    """x B in float32, of the `_parts` of x (P, AGES) and B (AGES, W)."""
    sums = tl.zeros((parts[0].shape[0], B.shape[1]), tl.float32)
    for part in tl.static_range(len(parts)):
        x = parts[part]
        if B.dtype == tl.bfloat16 and not INTERPRET:
            sums = tl.dot(x, B, sums)
        else:
            sums = tl.dot(x.to(tl.float32), B.to(tl.float32), sums, input_precision="ieee")
    return sums
