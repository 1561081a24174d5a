"""Triton pieces that end a step on a packed state: its gate, its output, and the sums for the next norm."""

import triton
import triton.language as tl

from mamba_kernels.triton_math import silu


@triton.jit
def load_gate(z_ptr, p, p_in, GATE: tl.constexpr):
    """z of rows p; zeros, which nobody reads, where there is no gate."""
    z = tl.zeros(p.shape, tl.float32)
    if GATE:
        z = tl.load(z_ptr + p, mask=p_in, other=0.0).to(tl.float32)
    return z


@triton.jit
def finish(y, z, norm_weight, scaled_ptr, p, p_in, GATE: tl.constexpr, NORM: tl.constexpr):
    """Gate rows p of y (P,) and write them, times the norm's weight; return their sum of squares (1,).

    NORM: "none", "gate_first" or "norm_first".
    """
    gated = y
    if GATE:
        gated = y * silu(z)
    scaled = gated
    if NORM != "none":
        scaled = gated * norm_weight.to(tl.float32)
    tl.store(scaled_ptr + p, scaled.to(scaled_ptr.dtype.element_ty), mask=p_in)
    normed = y if NORM == "norm_first" else gated
    return tl.sum(tl.where(p_in, normed * normed, 0.0), axis=0, keep_dims=True)


@triton.jit
def store_squares(squares_ptr, tile, square, COUNT: tl.constexpr, SQUARES: tl.constexpr):
    """Store square (1,) as the first of a tile's COUNT parts of a head's SQUARES, zero as the others.

    Tiles of two sizes write a head's parts, at different tokens; the parts are those of the smaller.
    """
    i = tl.arange(0, COUNT)
    part = tile * COUNT + i
    squares = tl.where(i == 0, tl.broadcast_to(square, (COUNT,)), 0.0)
    tl.store(squares_ptr + part, squares, mask=part < SQUARES)
