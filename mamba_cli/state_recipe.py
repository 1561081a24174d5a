"""Which heads of an SSM state can live in few bits: the rule behind "int8", "fp8" and "int4".

A head forgets by a = 2^(-1/half-life) a token. A state that is rounded every `window` tokens, each time
with an independent error of relative size `one_shot`, carries the sum of what is left of these errors:

    error^2 = one_shot^2 (1 + a^(2 window) + a^(4 window) + ...) = one_shot^2 / (1 - a^(2 window))

so an error that a head of 8 tokens forgets before the next writing, one of 10,000 tokens multiplies by
thirty. Stochastic rounding makes the errors independent and without bias. Rounding to nearest is smaller
by sqrt(2) while inputs are lively, but an update below half a quantum is lost each time it comes, and a
long-lived head is made of such updates. The formula is what random inputs cost, to a few percent from 1 to
10,000 tokens as long as it stays below a half (benchmarks/state_formats.py, `half-lives`); steady ones cost
less. So a head moves up a ladder of formats as its half-life grows: few do, and they decide how a quantized
model ages.
"""

import math

import torch

# dtype -> rounding and window (tokens between two writings of a head). A window of 8 is where the bytes
# that a step moves are fewest: of 128 int8 values a row, 128 are read, 128 / window written, and 2 window
# of remembered inputs read: 160 bytes with 8 tokens, 168 with 4 or 16, 258 with 1. It takes as much memory
# as a fifth bit of int4 that carries what each rounding lost, which is no more exact (mean |change of a
# token's NLL| 0.053 against 0.052) and is written at every token.
RECOMMENDED: dict[str, tuple[str, int]] = {
    dtype: ("stochastic", 8) for dtype in ("int4", "int8", "fp8", "bf16", "fp16")
}

# Relative error (norm) that one stochastic rounding leaves on a row of 128 normal values.
ONE_SHOT = {"int4": 0.166, "fp8": 0.0363, "int8": 0.0091, "bf16": 0.0024, "fp16": 0.00028, "fp32": 0.0}

# What a head may be stored in, narrowest first, each format with the relative error up to which it is
# taken. With a window of 8 a head leaves int4 at 26 tokens, fp8 at 15, int8 at 59 (329 on int4's ladder)
# and fp16 at 3,500. mamba_ssm initialises Mamba2 to half-lives of 0.4 to 693 tokens (A uniform in 1 to 16,
# dt log-uniform in 0.001 to 0.1): int4 comes to 5.2 bits an element there, int8 and fp8 to 8.9.
# The demo model on 41k tokens it was not trained on (`state_formats.py text`): change of perplexity and mean
# |change of a token's NLL| are -0.001% +- 0.003 and 0.0033 for int8, +0.005% +- 0.003 and 0.0046 for fp8,
# +0.05% +- 0.02 and 0.028 for int4; with every head in int4 +0.18% +- 0.04 and 0.052. Tolerating 0.34 there
# leaves five of 64 heads more in int4: +0.14% +- 0.03 and 0.040.
_LAST = (("fp16", 0.005), ("fp32", math.inf))
LADDERS: dict[str, tuple[tuple[str, float], ...]] = {
    "int4": (("int4", 0.28), ("int8", 0.05), *_LAST),
    "fp8": (("fp8", 0.05), ("int8", 0.022), *_LAST),
    "int8": (("int8", 0.022), *_LAST),
    "bf16": (("bf16", 0.01), *_LAST),
    "fp16": _LAST,
    "fp32": (("fp32", math.inf),),
}


def half_lives(A: torch.Tensor, dt: torch.Tensor) -> torch.Tensor:
    """Return the tokens after which half of a state is forgotten, ln 2 / (dt |A|), in the shape of A.

    A: (nheads,), or (d_inner, d_state) for Mamba-1, negative. dt: (nheads,) or (d_inner,) mean step sizes:
    of a text, or softplus(dt_bias), which is what a text's stray around.
    """
    dt = dt.reshape(dt.shape + (1,) * (A.dim() - dt.dim()))
    return math.log(2) / (dt * A.abs())


def predicted_error(half_lives: torch.Tensor, dtype: str, window: int) -> torch.Tensor:
    """Return the relative error (norm) that a head's state settles at, (nheads,).

    half_lives: (nheads,) tokens, or (nheads, ...) where the elements of a head decay at different rates.
    """
    lives = half_lives.double().clamp(max=1e12)  # a head that forgets nothing
    carried = -1 / torch.expm1(-2 * math.log(2) * window / lives)
    return ONE_SHOT[dtype] * carried.reshape(len(lives), -1).mean(1).sqrt()


def choose_heads(half_lives: torch.Tensor, dtype: str, window: int) -> tuple[str, ...]:
    """Return the dtype of each head of a layer whose state is meant to be `dtype`.

    half_lives: as in `predicted_error`. window: tokens between two writings of a head.
    """
    ladder = LADDERS[dtype]
    errors = {rung: predicted_error(half_lives, rung, window).tolist() for rung, _ in ladder}
    return tuple(
        next(rung for rung, tolerated in ladder if errors[rung][head] <= tolerated)
        for head in range(len(half_lives))
    )
