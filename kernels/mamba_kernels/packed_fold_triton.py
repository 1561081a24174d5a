"""Triton pieces that fold a head's window into its stored state, which is rounded then."""

import triton
import triton.language as tl

from mamba_kernels.decode_norm_triton import inside, wait_for_previous
from mamba_kernels.packed_output_triton import finish, load_gate, store_squares
from mamba_kernels.packed_window_triton import inverse_columns, load_columns, stored_and_window
from mamba_kernels.state_codes_triton import encode, is_scaled, per_word, rounding_key
from mamba_kernels.triton_math import softplus


@triton.jit
def fold_rows(
    zxbcdt_ptr, codes_ptr, scales_ptr, past_x_ptr, past_B_ptr, past_dt_ptr, position_ptr, columns_ptr,
    dt_bias_ptr, A_log_ptr, D_ptr, norm_weight_ptr, scaled_ptr, squares_ptr,
    seed, dt_min, dt_max, stride_in, stride_scales, stride_x, stride_B, stride_dt, stride_D_head,
    stride_scaled, stride_squares, tile, head, batch, slot,
    KIND: tl.constexpr, NHEADS: tl.constexpr, HEADDIM: tl.constexpr, D_STATE: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr, WINDOW: tl.constexpr, STOCHASTIC: tl.constexpr, D_P: tl.constexpr,
    GATE: tl.constexpr, NORM: tl.constexpr, SQUARES: tl.constexpr, FOLD_P: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_AGE: tl.constexpr, PDL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Tile `tile` of FOLD_P rows of a head of format KIND: its codes, at codes_ptr, move on to this token.

    The whole state is needed here, so the window is replayed, and C meets the state before it is rounded:
    nothing is taken from `packed_prepare_triton`. SQUARES: the parts of the sum of squares of a head.
    """
    FIELDS: tl.constexpr = per_word(KIND)
    BLOCK_W: tl.constexpr = BLOCK_N // FIELDS
    D_SSM: tl.constexpr = NHEADS * HEADDIM
    BC: tl.constexpr = NHEADS // HEADS_PER_GROUP * D_STATE
    group = head // HEADS_PER_GROUP
    w = tl.arange(0, BLOCK_W)
    p = tile * FOLD_P + tl.arange(0, FOLD_P)
    p_in = inside(p, HEADDIM, FOLD_P)
    position = tl.load(position_ptr + slot)
    A = -tl.exp(tl.load(A_log_ptr + head).to(tl.float32))
    dt_bias = tl.load(dt_bias_ptr + head).to(tl.float32)
    D = tl.load(D_ptr + head * stride_D_head + p * D_P, mask=p_in, other=0.0).to(tl.float32)
    norm_weight = D
    if NORM != "none":
        norm_weight = tl.load(norm_weight_ptr + head * HEADDIM + p, mask=p_in, other=0.0)
    scales_ptr += slot * stride_scales + head * HEADDIM
    past_x_ptr += slot * stride_x + head * HEADDIM
    past_B_ptr += slot * stride_B + group * D_STATE
    past_dt_ptr += slot * stride_dt + head
    columns = columns_ptr
    if columns_ptr is not None:
        columns = columns_ptr + head * D_STATE

    state = stored_and_window(
        codes_ptr, scales_ptr, columns, past_x_ptr, past_B_ptr, past_dt_ptr, 0.0, A, position,
        (position + head) % WINDOW, p, p_in, w, KIND, NHEADS, D_STATE, D_SSM, BC, WINDOW, BLOCK_W, BLOCK_AGE,
    )  # fmt: skip

    wait_for_previous(PDL)
    row = zxbcdt_ptr + batch * stride_in
    z_ptr = row + head * HEADDIM
    B_ptr = row + 2 * D_SSM + group * D_STATE
    dt = tl.load(row + 2 * D_SSM + 2 * BC + head).to(tl.float32)
    x_now = tl.load(z_ptr + D_SSM + p, mask=p_in, other=0.0)
    z = load_gate(z_ptr, p, p_in, GATE)
    dt = tl.minimum(tl.maximum(softplus(dt + dt_bias), dt_min), dt_max)
    x = x_now.to(tl.float32)
    key = rounding_key(seed, position, head)
    y = D * x
    y += _fold(
        state, codes_ptr, scales_ptr, columns, B_ptr, B_ptr + BC, dt * x, tl.exp(A * dt), key, p, p_in, w,
        KIND, D_STATE, STOCHASTIC, FOLD_P, BLOCK_W, INTERPRET,
    )  # fmt: skip
    scaled_ptr += batch * stride_scaled + head * HEADDIM
    square = finish(y, z, norm_weight, scaled_ptr, p, p_in, GATE, NORM)
    if NORM != "none":
        store_squares(squares_ptr + batch * stride_squares + head * SQUARES, tile, square, 1, SQUARES)
    now = position % WINDOW
    tl.store(past_x_ptr + now * D_SSM + p, x_now, mask=p_in)


@triton.jit
def _fold(
    past, codes_ptr, scales_ptr, columns, B_ptr, C_ptr, input, decay, key, p, p_in, w,
    KIND: tl.constexpr, D_STATE: tl.constexpr, STOCHASTIC: tl.constexpr, FOLD_P: tl.constexpr,
    BLOCK_W: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Round rows p (FOLD_P,) of a head, h = decay * past + input B, into its codes and scales; return C h.

    past: fields (FOLD_P, BLOCK_W). input: dt x (FOLD_P,). key: of the stochastic rounding.
    """
    FIELDS: tl.constexpr = per_word(KIND)
    WORDS: tl.constexpr = (D_STATE + FIELDS - 1) // FIELDS
    state = ()
    for field in tl.static_range(FIELDS):
        B = load_columns(B_ptr, w, field, WORDS, D_STATE, BLOCK_W)
        state += (past[field] * decay + input[:, None] * B[None, :],)
    products = tl.zeros((FOLD_P, BLOCK_W), tl.float32)
    rounded = ()
    for field in tl.static_range(FIELDS):
        products += state[field] * load_columns(C_ptr, w, field, WORDS, D_STATE, BLOCK_W)[None, :]
        part = state[field]
        if columns is not None and is_scaled(KIND):
            part *= inverse_columns(columns, w, field, WORDS, D_STATE, BLOCK_W)[None, :]
        rounded += (part,)
    words, scale = encode(rounded, p, w, key, KIND, WORDS, STOCHASTIC, INTERPRET)
    word_in = p_in[:, None] & inside(w, WORDS, BLOCK_W)[None, :]
    tl.store(codes_ptr + (p * WORDS)[:, None] + w[None, :], words, mask=word_in)
    if is_scaled(KIND):
        tl.store(scales_ptr + p, scale, mask=p_in)
    return tl.sum(products, axis=1)
