"""Triton pieces that load what a head of a packed state is stored as: words, scales of rows, of columns."""

import triton
import triton.language as tl

from mamba_kernels.decode_norm_triton import inside
from mamba_kernels.state_codes_triton import is_scaled


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
