"""From a continuous diagonal state space to a recurrence: the four rules, in torch.

    h'(t) = A h(t) + B u(t)   becomes   h[t] = decay * h[t-1] + gain * B * u[t]

    rule         decay                  gain
    "mamba"      exp(a)                 delta                     the rule of Mamba's code: zoh, its gain
                                                                  to first order in delta
    "zoh"        exp(a)                 expm1(delta A) / A        Mamba (arXiv 2312.00752), equation 4
    "bilinear"   (1 + a/2) / (1 - a/2)  delta / (1 - delta A/2)   S4 (arXiv 2111.00396), equation 3
    "dirac"      exp(a)                 1                         inputs are impulses

with a = delta * A; or a = deltaA * A, where the state decays over another time than the input is held:
asynchronous, event-driven input (arXiv 2404.18508). `discretization_triton` holds the same for kernels.
"""

import math

import torch

LOG2E = 1 / math.log(2)
DISCRETIZATIONS = ("mamba", "zoh", "bilinear", "dirac")


def discretize(
    delta: torch.Tensor,
    deltaA: torch.Tensor | None,
    A: torch.Tensor,
    discretization: str,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (decay, gain) of the module's table, each of a shape that broadcasts to the state's.

    delta, deltaA (None: as delta): real; A: real or complex; all three broadcast against each other.
    Differentiable in all three, also where A is 0. An exponential decay is written to `out`, if given,
    which only goes without autograd.
    """
    decay_delta = delta if deltaA is None else deltaA
    if discretization == "bilinear":
        inverse = 1 / (1 - decay_delta * A / 2)
        gain = delta * inverse if deltaA is None else delta / (1 - delta * A / 2)
        return 2 * inverse - 1, gain
    if A.is_complex():
        decay = torch.mul(decay_delta, A, out=out).exp_()
    else:
        # To base 2: on a CPU exp2 takes a third of exp's time, and less of it where the decay underflows.
        decay = torch.mul(decay_delta * LOG2E, A, out=out).exp2_()
    if discretization == "zoh":
        return decay, delta * expm1_ratio(delta * A)
    return decay, delta if discretization == "mamba" else torch.ones_like(delta)


def expm1_ratio(x: torch.Tensor) -> torch.Tensor:
    """(exp(x) - 1) / x, which is 1 at 0; value and derivative are good to the dtype's precision."""
    small = x.abs() < 0.5
    # Taylor's terms x^k / (k + 1)!, by Horner. At |x| = 0.5 the first one left out is below rounding.
    terms = 15 if x.dtype in (torch.float64, torch.complex128) else 8
    near = torch.where(small, x, 0)
    series = torch.ones_like(x)
    for k in range(terms + 1, 1, -1):
        series = 1 + near / k * series
    far = torch.where(small, 1, x)
    return torch.where(small, series, torch.expm1(far) / far)
