"""The stress case: heads that remember hundreds to 10,000 tokens, fed small steady updates for 20,000.

Each update is far below half a quantum of int8, so that rounding to nearest loses it, token after token.
Three sequences are read side by side: the same x and B at every token; B with noise of its own size; and
one token as large as all that follows together, after which x is small and steady and B another.
"""

import math
from functools import cache

import pytest
import torch

from mamba_cli.state_recipe import RECOMMENDED, choose_heads
from mamba_kernels.decode_norm import NormBuffers
from mamba_kernels.packed_ssm_step import packed_ssm_step_ref
from mamba_kernels.packed_state import LayerFormat, advance_positions, empty_packed_state

STEADY, NOISY, REMEMBERED = range(3)
TOKENS, CHECKS = 20_000, 20  # the states are compared so often, evenly spread
HEADDIM, D_STATE, DT = 2, 64, 0.01
HALF_LIVES = (300, 3_000, 10_000)
BOUNDS = {"int8": 0.01, "fp8": 0.02, "int4": 0.05}
CPU = torch.device("cpu")


def inputs(half_lives: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x (TOKENS, 3, nheads, HEADDIM) and B (TOKENS, 3, 1, D_STATE) of the three sequences."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(HEADDIM, generator=random).expand(TOKENS, 3, len(half_lives), HEADDIM).clone()
    B = torch.randn(D_STATE, generator=random).expand(TOKENS, 3, 1, D_STATE).clone()
    B[:, NOISY] += torch.randn(TOKENS, 1, D_STATE, generator=random)
    x[0, REMEMBERED] *= half_lives[:, None] / math.log(2)
    B[0, REMEMBERED] = torch.randn(D_STATE, generator=random)
    return x, B


def errors(format: LayerFormat, half_lives: torch.Tensor) -> torch.Tensor:
    """Relative error (norm) of each head's state, (CHECKS, 3, nheads), through the decode step."""
    nheads = len(half_lives)
    packed = empty_packed_state(format, 3, nheads, HEADDIM, D_STATE, 1, torch.float32, CPU)
    A = -math.log(2) / (half_lives * DT)
    dt_bias = torch.full((nheads,), math.log(math.expm1(DT)))
    out = NormBuffers.empty(3, nheads * HEADDIM, torch.float32, CPU)
    exact = torch.zeros(3, nheads, HEADDIM, D_STATE, dtype=torch.float64)
    kept = 2.0 ** (-1 / half_lives.double())[:, None, None]
    z_C_dt = (torch.zeros(3, nheads * HEADDIM), torch.zeros(3, D_STATE), torch.zeros(3, nheads))
    found = []
    for token, (x, B) in enumerate(zip(*inputs(half_lives), strict=True), 1):
        row = torch.cat([z_C_dt[0], x.flatten(1), B.flatten(1), *z_C_dt[1:]], 1)
        packed_ssm_step_ref(
            row, packed, dt_bias, (-A).log(), A.new_zeros(nheads), None, 0.0, out, ngroups=1, gate=False
        )
        advance_positions([packed])
        exact.mul_(kept).addcmul_(x[..., None], B[..., None, :], value=DT)
        if token % (TOKENS // CHECKS) == 0:
            error = packed.unpack(A) - exact
            found.append(error.flatten(2).norm(dim=2) / exact.flatten(2).norm(dim=2))
    return torch.stack(found)


@cache
@torch.inference_mode()
def recommended_errors() -> torch.Tensor:
    """`errors` of the heads that the three recipes choose, (CHECKS, 3, recipes, half-lives)."""
    half_lives = torch.tensor(HALF_LIVES, dtype=torch.float32)
    # One layer takes them all: a step of three costs three times as long.
    (rounding, window), *others = {RECOMMENDED[dtype] for dtype in BOUNDS}
    assert not others
    heads = [head for dtype in BOUNDS for head in choose_heads(half_lives, dtype, window)]
    found = errors(LayerFormat(tuple(heads), rounding, window), half_lives.repeat(len(BOUNDS)))
    return found.unflatten(2, (len(BOUNDS), len(HALF_LIVES)))


@pytest.mark.parametrize("dtype", BOUNDS)
def test_a_recommended_state_stays_within_its_bound_all_along(dtype: str) -> None:
    assert recommended_errors()[:, :, list(BOUNDS).index(dtype)].max() < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", BOUNDS)
def test_the_error_of_a_recommended_state_does_not_grow(dtype: str) -> None:
    quarters = recommended_errors()[:, :, list(BOUNDS).index(dtype)].unflatten(0, (4, -1))
    second, last = quarters[1].square().mean(0).sqrt(), quarters[3].square().mean(0).sqrt()
    # The error of a head is random: a quarter sees that of some hundred numbers, hardly changed meanwhile.
    assert (last < 1.3 * second + BOUNDS[dtype] / 100).all()


@torch.inference_mode()
def test_int8_written_to_nearest_at_every_token_fails() -> None:
    found = errors(LayerFormat(("int8",), "nearest", 1), torch.tensor([10_000.0]))[..., 0]
    assert found[-1, NOISY] > 0.05
    assert found[-1, REMEMBERED] > 0.5
