"""Scalar functions that Triton kernels share, accurate in float32 over their whole range."""

import triton
import triton.language as tl


@triton.jit
def log1p(x):
    """log(1 + x) for x >= 0; the factor x / ((1 + x) - 1) takes back the rounding of 1 + x (Kahan)."""
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * (x / tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit
def softplus(x):
    """log(1 + exp(x)), and x itself above 20, as torch.nn.functional.softplus."""
    return tl.where(x <= 20.0, log1p(tl.exp(tl.minimum(x, 20.0))), x)


@triton.jit
def expm1_ratio(a):
    """(exp(a) - 1) / a, finite and smooth through a = 0, where it is 1."""
    small = tl.abs(a) < 0.25
    series = 1.0 + a / 2 * (1.0 + a / 3 * (1.0 + a / 4 * (1.0 + a / 5 * (1.0 + a / 6 * (1.0 + a / 7)))))
    return tl.where(small, series, (tl.exp(a) - 1.0) / tl.where(small, 1.0, a))


@triton.jit
def silu(x):
    """x * sigmoid(x)."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def sigmoid(x, INTERPRET: tl.constexpr):
    """1 / (1 + exp(-x)) to 2 units of float32 rounding, in 4 instructions.

    tl.exp and / guard denormal results as well, which cannot matter here, at three times the instructions.
    INTERPRET: whether Triton's interpreter runs, which knows no assembly.
    """
    if INTERPRET:
        return 1.0 / (1.0 + tl.exp(-x))
    else:
        return tl.inline_asm_elementwise(
            """{ .reg .f32 e;
                 mul.ftz.f32 e, $1, 0fBFB8AA3B;
                 ex2.approx.ftz.f32 e, e;
                 add.ftz.f32 e, e, 0f3F800000;
                 rcp.approx.ftz.f32 $0, e; }""",
            "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
