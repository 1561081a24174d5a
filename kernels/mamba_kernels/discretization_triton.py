"""The rules of `discretization` for Triton kernels, with what their derivatives need.

A number is a pair (real, imaginary part). Where COMPLEX is false the second of a pair is a copy of the
first that nothing reads: the compiler drops it, and one source serves both kinds. RULE is the name of a
rule. Steps (delta) are real; A and what is derived from it broadcast against them.

Derivatives are those of holomorphic functions; a gradient, in torch's convention, is the incoming one
times their conjugate (see `cmul_conj`).
"""

import triton
import triton.language as tl

from mamba_kernels.triton_math import LOG2E, exp_of_product, sincos


@triton.jit
def load_pair(ptrs, imaginary, mask, COMPLEX: tl.constexpr):
    """Load numbers whose imaginary parts lie `imaginary` elements after the real ones, as float32."""
    re = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    im = re
    if COMPLEX:
        im = tl.load(ptrs + imaginary, mask=mask, other=0.0).to(tl.float32)
    return re, im


@triton.jit
def store_pair(ptrs, imaginary, re, im, mask, COMPLEX: tl.constexpr):
    """Store what load_pair loads."""
    tl.store(ptrs, re.to(ptrs.dtype.element_ty), mask=mask)
    if COMPLEX:
        tl.store(ptrs + imaginary, im.to(ptrs.dtype.element_ty), mask=mask)


@triton.jit
def cmul(a_re, a_im, b_re, b_im, COMPLEX: tl.constexpr):
    """a * b."""
    re = a_re * b_re
    im = re
    if COMPLEX:
        re -= a_im * b_im
        im = a_re * b_im + a_im * b_re
    return re, im


@triton.jit
def cmul_conj(a_re, a_im, b_re, b_im, COMPLEX: tl.constexpr):
    """a * conj(b)."""
    re = a_re * b_re
    im = re
    if COMPLEX:
        re += a_im * b_im
        im = a_im * b_re - a_re * b_im
    return re, im


@triton.jit
def real_of_product(a_re, a_im, b_re, b_im, COMPLEX: tl.constexpr):
    """The real part of a * b."""
    re = a_re * b_re
    if COMPLEX:
        re -= a_im * b_im
    return re


@triton.jit
def real_of_conj_product(a_re, a_im, b_re, b_im, COMPLEX: tl.constexpr):
    """The real part of a * conj(b)."""
    re = a_re * b_re
    if COMPLEX:
        re += a_im * b_im
    return re


@triton.jit
def _exp(delta, A_re, A_im, COMPLEX: tl.constexpr):
    """exp(delta * A)."""
    if COMPLEX:
        re = exp_of_product(delta, A_re)
        sin, cos = sincos(delta * A_im)
        im = re * sin
        re = re * cos
    else:
        re = tl.exp2(delta * (A_re * LOG2E))
        im = re
    return re, im


@triton.jit
def _reciprocal(re, im, COMPLEX: tl.constexpr):
    """1 / x."""
    if COMPLEX:
        scale = 1.0 / (re * re + im * im)
        re = re * scale
        im = -im * scale
    else:
        re = 1.0 / re
        im = re
    return re, im


@triton.jit
def _bilinear_inverse(delta, A_re, A_im, COMPLEX: tl.constexpr):
    """1 / (1 - delta * A / 2)."""
    return _reciprocal(1.0 - delta * (A_re * 0.5), delta * (A_im * -0.5), COMPLEX)


@triton.jit
def _expm1_ratio(x_re, x_im, exp_re, exp_im, COMPLEX: tl.constexpr):
    """((exp(x) - 1) / x, its derivative), given exp(x): Taylor's series near 0, the quotients elsewhere."""
    size = x_re * x_re
    if COMPLEX:
        size += x_im * x_im
    near = size < 0.25
    s_re = tl.where(near, x_re, 0.0)
    s_im = tl.where(near, x_im, 0.0)
    # sum of x^(k-1) / k! and of k x^(k-1) / (k + 1)!; the first terms left out are 2e-9 of the sums
    value_re = tl.zeros_like(x_re)
    value_im = value_re
    slope_re = value_re
    slope_im = value_re
    factorial = 362880.0
    for k in tl.static_range(8, 0, -1):
        slope_re, slope_im = cmul(slope_re, slope_im, s_re, s_im, COMPLEX)
        slope_re += k / factorial
        factorial /= k + 1
        value_re, value_im = cmul(value_re, value_im, s_re, s_im, COMPLEX)
        value_re += 1.0 / factorial

    r_re, r_im = _reciprocal(tl.where(near, 1.0, x_re), tl.where(near, 0.0, x_im), COMPLEX)
    far_re, far_im = cmul(exp_re - 1.0, exp_im, r_re, r_im, COMPLEX)
    far_slope_re, far_slope_im = cmul(exp_re - far_re, exp_im - far_im, r_re, r_im, COMPLEX)
    value_re = tl.where(near, value_re, far_re)
    value_im = tl.where(near, value_im, far_im)
    slope_re = tl.where(near, slope_re, far_slope_re)
    slope_im = tl.where(near, slope_im, far_slope_im)
    return value_re, value_im, slope_re, slope_im


@triton.jit
def decay_of(delta, A_re, A_im, RULE: tl.constexpr, COMPLEX: tl.constexpr):
    """What multiplies the state."""
    if RULE == "bilinear":
        # 1 + a / (1 - a/2): exact where a is small, and errors would add up over many tokens
        re, im = _bilinear_inverse(delta, A_re, A_im, COMPLEX)
        re, im = cmul(re, im, delta * A_re, delta * A_im, COMPLEX)
        re += 1.0
    else:
        re, im = _exp(delta, A_re, A_im, COMPLEX)
    return re, im


@triton.jit
def decay_slope_of(decay_re, decay_im, RULE: tl.constexpr, COMPLEX: tl.constexpr):
    """The derivative of the decay in a = delta * A, from the decay."""
    if RULE == "bilinear":
        half_re = 0.5 * decay_re + 0.5
        half_im = 0.5 * decay_im
        re, im = cmul(half_re, half_im, half_re, half_im, COMPLEX)
    else:
        re = decay_re
        im = decay_im
    return re, im


@triton.jit
def gain_of(delta, A_re, A_im, RULE: tl.constexpr, COMPLEX: tl.constexpr):
    """(gain, its derivative in delta, its derivative in A) for the rules whose gain depends on A."""
    tl.static_assert(RULE == "zoh" or RULE == "bilinear")
    if RULE == "bilinear":
        i_re, i_im = _bilinear_inverse(delta, A_re, A_im, COMPLEX)
        ddelta_re, ddelta_im = cmul(i_re, i_im, i_re, i_im, COMPLEX)
        scale = 0.5 * delta * delta
        return delta * i_re, delta * i_im, ddelta_re, ddelta_im, scale * ddelta_re, scale * ddelta_im
    else:
        exp_re, exp_im = _exp(delta, A_re, A_im, COMPLEX)
        ratio_re, ratio_im, slope_re, slope_im = _expm1_ratio(
            delta * A_re, delta * A_im, exp_re, exp_im, COMPLEX
        )
        square = delta * delta
        return delta * ratio_re, delta * ratio_im, exp_re, exp_im, square * slope_re, square * slope_im
