"""Triton pieces that read a head of a packed state: its stored rows, and the window of inputs since then."""

import triton
import triton.language as tl

from mamba_kernels.decode_norm_triton import inside
from mamba_kernels.state_codes_triton import decode, decoded_unit, is_scaled, per_word


@triton.jit
def stored_and_window(
    codes_ptr, scales_ptr, columns, past_x_ptr, past_B_ptr, past_dt_ptr,
    A, position, count, p, p_in, w,
    KIND: tl.constexpr, NHEADS: tl.constexpr, D_STATE: tl.constexpr, D_SSM: tl.constexpr, BC: tl.constexpr,
    WINDOW: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_AGE: tl.constexpr,
):  # fmt: skip
    """The rows p (P,) of a head, with its window folded in, as fields (P, BLOCK_W).

    count: inputs in the window, the last before `position`. The pointers are the head's, and the group's.
    """
    FIELDS: tl.constexpr = per_word(KIND)
    WORDS: tl.constexpr = (D_STATE + FIELDS - 1) // FIELDS
    words = load_words(codes_ptr, p, p_in, w, WORDS, BLOCK_W)
    scale = load_scale(scales_ptr, p, p_in, KIND)
    age = tl.arange(0, BLOCK_AGE)
    rings = (position + (2 * WINDOW - 1) - age) % WINDOW
    total = tl.sum(tl.load(past_dt_ptr + rings * NHEADS, mask=age < count, other=0.0), axis=0)
    scale *= tl.exp(A * total) * decoded_unit(KIND)
    fields = decode(words, KIND)
    state = ()
    for field in tl.static_range(FIELDS):
        part = fields[field] * scale[:, None]
        if columns is not None and is_scaled(KIND):
            part *= load_columns(columns, w, field, WORDS, D_STATE, BLOCK_W)[None, :]
        state += (part,)
    since = tl.zeros_like(total)
    if WINDOW <= 16:
        # Unrolled, the loads of all inputs are under way at once.
        for back in tl.static_range(WINDOW - 1):
            state, since = _add_input(
                state, since, back, count > back, A, position, past_x_ptr, past_B_ptr, past_dt_ptr, p, p_in,
                w, NHEADS, D_STATE, D_SSM, BC, WINDOW, FIELDS, WORDS, BLOCK_W,
            )  # fmt: skip
    else:
        for back in range(0, count):
            state, since = _add_input(
                state, since, back, count > back, A, position, past_x_ptr, past_B_ptr, past_dt_ptr, p, p_in,
                w, NHEADS, D_STATE, D_SSM, BC, WINDOW, FIELDS, WORDS, BLOCK_W,
            )  # fmt: skip
    return state


@triton.jit
def _add_input(
    state, since, back, live, A, position, past_x_ptr, past_B_ptr, past_dt_ptr, p, p_in, w,
    NHEADS: tl.constexpr, D_STATE: tl.constexpr, D_SSM: tl.constexpr, BC: tl.constexpr,
    WINDOW: tl.constexpr, FIELDS: tl.constexpr, WORDS: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Add the input of `back` + 1 tokens ago, where it is `live`; `since`: the sum of dt after it."""
    ring = (position + (WINDOW - 1) - back) % WINDOW
    past_dt = tl.where(live, tl.load(past_dt_ptr + ring * NHEADS), 0.0)
    past_x = tl.load(past_x_ptr + ring * D_SSM + p, mask=p_in, other=0.0).to(tl.float32)
    past_x *= past_dt * tl.exp(A * since)
    moved = ()
    for field in tl.static_range(FIELDS):
        past_B = load_columns(past_B_ptr + ring * BC, w, field, WORDS, D_STATE, BLOCK_W)
        moved += (state[field] + past_x[:, None] * past_B[None, :],)
    return moved, since + past_dt


@triton.jit
def load_words(codes_ptr, p, p_in, w, WORDS: tl.constexpr, BLOCK_W: tl.constexpr):
    word_in = p_in[:, None] & inside(w, WORDS, BLOCK_W)[None, :]
    return tl.load(codes_ptr + (p * WORDS)[:, None] + w[None, :], mask=word_in, other=0, volatile=True)


@triton.jit
def load_scale(scales_ptr, p, p_in, KIND: tl.constexpr):
    """The scales of rows p; 1 for a format without."""
    scale = tl.full(p.shape, 1.0, tl.float32)
    if is_scaled(KIND):
        scale = tl.load(scales_ptr + p, mask=p_in, other=0.0)
    return scale


@triton.jit
def load_columns(
    ptr, w, field: tl.constexpr, WORDS: tl.constexpr, D_STATE: tl.constexpr, BLOCK_W: tl.constexpr
):
    """Of a row of D_STATE numbers, those whose state is field `field` of words w; zero past the end."""
    if WORDS == BLOCK_W and (field + 1) * WORDS <= D_STATE:
        return tl.load(ptr + field * WORDS + w).to(tl.float32)
    else:
        column_in = (w < WORDS) & (field * WORDS + w < D_STATE)
        return tl.load(ptr + field * WORDS + w, mask=column_in, other=0.0).to(tl.float32)


@triton.jit
def inverse_columns(
    columns, w, field: tl.constexpr, WORDS: tl.constexpr, D_STATE: tl.constexpr, BLOCK_W: tl.constexpr
):
    """1 / `load_columns`, rounded as torch rounds it; 1 past the end."""
    column = load_columns(columns, w, field, WORDS, D_STATE, BLOCK_W)
    return tl.div_rn(tl.full((BLOCK_W,), 1.0, tl.float32), tl.where(column > 0, column, 1.0))
