"""Scalar functions that Triton kernels share, accurate in float32 over their whole range."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# What float32 loses of it.
_LOG2E_REST = tl.constexpr(1.925963033500e-8)
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def softplus(x):
    """log(1 + exp(x)), as max(x, 0) + log1p(exp(-|x|)).

    log1p(e) / e on 0 <= e <= 1 is a polynomial of degree 8, fitted to a relative error of 3e-8 (least
    squares at Chebyshev points, reweighted by the error): no logarithm, which would lose small e in 1 + e,
    and no division.
    """
    # The product's rounding alone would be an error of |x| units in e.
    size = tl.abs(x)
    power = size * -LOG2E
    rest = tl.where(size < 100, tl.fma(size, -LOG2E, -power) - size * _LOG2E_REST, 0.0)
    e = tl.exp2(power)
    e += e * (rest * _LN2)
    p = 0.005232629366219044
    p = p * e - 0.029504986479878426
    p = p * e + 0.07822556048631668
    p = p * e - 0.13663214445114136
    p = p * e + 0.1910599321126938
    p = p * e - 0.2484297901391983
    p = p * e + 0.3331909775733948
    p = p * e - 0.4999949336051941
    p = p * e + 0.9999999403953552
    return tl.maximum(x, 0.0) + p * e


@triton.jit
def exp_of_product(x, y):
    """exp(x y), of which the roundings of x y and of its product with log2(e) would be |x y| units each."""
    product = x * y
    power = product * LOG2E
    rest = tl.fma(product, LOG2E, -power) + product * _LOG2E_REST + tl.fma(x, y, -product) * LOG2E
    e = tl.exp2(power)
    return e + e * (tl.where(tl.abs(product) < 100, rest, 0.0) * _LN2)


@triton.jit
def expm1_ratio(a):
    """(exp(a) - 1) / a, finite and smooth through a = 0, where it is 1."""
    small = tl.abs(a) < 0.25
    series = 1.0 + a / 2 * (1.0 + a / 3 * (1.0 + a / 4 * (1.0 + a / 5 * (1.0 + a / 6 * (1.0 + a / 7)))))
    return tl.where(small, series, (tl.exp(a) - 1.0) / tl.where(small, 1.0, a))


@triton.jit
def silu(x):
    """x * sigmoid(x)."""
    return x / (1.0 + tl.exp2(x * -LOG2E))


@triton.jit
def sigmoid(x, INTERPRET: tl.constexpr):
    """1 / (1 + exp(-x)), see `logistic_quotient`."""
    return logistic_quotient(tl.full(x.shape, 1.0, tl.float32), x, INTERPRET)


@triton.jit
def logistic_quotient(y, x, INTERPRET: tl.constexpr):
    """y / (1 + exp(-x)) to 3 units of float32 rounding; for x < -87 what it is there, 2e-38 y.

    The product of x with log2(e) is carried in two parts: its rounding alone would be |x| units in exp(-x).
    And the quotient is put right by its remainder, as a reciprocal is a unit off. tl.exp and / guard denormal
    results as well, which cannot matter here, at twice the instructions.
    INTERPRET: whether Triton's interpreter runs, which knows no assembly.
    """
    if INTERPRET:
        return y / (1.0 + tl.exp(-x))
    else:
        return tl.inline_asm_elementwise(
            """{ .reg .f32 e, p, r, q, x;
                 max.ftz.f32 x, $2, 0fC2AE0000;
                 mul.rn.ftz.f32 p, x, 0fBFB8AA3B;
                 neg.ftz.f32 x, x;
                 fma.rn.ftz.f32 r, p, 0fBF317218, x;
                 ex2.approx.ftz.f32 e, p;
                 fma.rn.ftz.f32 e, e, r, e;
                 add.ftz.f32 e, e, 0f3F800000;
                 rcp.approx.ftz.f32 r, e;
                 mul.rn.ftz.f32 q, $1, r;
                 neg.ftz.f32 e, e;
                 fma.rn.ftz.f32 e, e, q, $1;
                 fma.rn.ftz.f32 $0, e, r, q; }""",
            "=f,f,f", [y, x], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def sincos(x):
    """(sin(x), cos(x)) from Taylor's series within pi / 4 of a multiple of pi / 2.

    pi / 2 is taken off in three parts, of 8, 11 and 24 bits, whose multiples are exact for |x| < 5e4; a
    larger x is not known to float32 better than this reduces it. Unlike tl.sin, no branch and no memory.
    """
    k = tl.floor(x * 0.6366197723675814 + 0.5)
    r = x - k * 1.5703125
    r = r - k * 0.0004837512969970703
    r = r - k * 7.549790126404332e-08
    s = r * r
    sin = r + r * s * (-1 / 6 + s * (1 / 120 + s * (-1 / 5040 + s * (1 / 362880))))
    cos = 1.0 + s * (-0.5 + s * (1 / 24 + s * (-1 / 720 + s * (1 / 40320))))
    quadrant = k.to(tl.int32) & 3
    odd = (quadrant & 1) == 1
    sin, cos = tl.where(odd, cos, sin), tl.where(odd, sin, cos)
    return tl.where(quadrant >= 2, -sin, sin), tl.where((quadrant == 1) | (quadrant == 2), -cos, cos)
