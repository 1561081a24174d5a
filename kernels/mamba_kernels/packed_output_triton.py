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
def finish(
    y, z, norm_weight, scaled_ptr, squares_ptr, squares, tile, p, p_in,
    GATE: tl.constexpr, NORM: tl.constexpr, COUNT: tl.constexpr, SQUARES: tl.constexpr,
):  # fmt: skip
    """Gate rows p of y (P,) and write them, times the norm's weight, and their sum of squares.

    NORM: "none", "gate_first" or "norm_first". scaled_ptr is the head's, as are the SQUARES parts of its sum
    of squares, from `squares` on: tiles of two sizes write them, at different tokens, this one the first of
    its COUNT parts, and zero as the others.
    """
    gated = y
    if GATE:
        gated = y * silu(z)
    scaled = gated
    if NORM != "none":
        scaled = gated * norm_weight.to(tl.float32)
        normed = y if NORM == "norm_first" else gated
        square = tl.sum(tl.where(p_in, normed * normed, 0.0), axis=0)
        i = tl.arange(0, COUNT)
        part = tile * COUNT + i
        tl.store(squares_ptr + squares + part, tl.where(i == 0, square, 0.0), mask=part < SQUARES)
    tl.store(scaled_ptr + p, scaled.to(scaled_ptr.dtype.element_ty), mask=p_in)
