"""The rule that gives each head of a quantized state its format."""

import math

import pytest
import torch

from mamba_cli.state_recipe import (
    LADDERS,
    ONE_SHOT,
    RECOMMENDED,
    choose_heads,
    half_lives,
    predicted_error,
)
from mamba_kernels.state_codes import FORMATS, STATE_DTYPES, decode, encode, rounding_keys

LIVES = torch.logspace(0, 5, 101)  # 1 to 100,000 tokens


def bits(heads: tuple[str, ...]) -> list[int]:
    return [FORMATS[dtype].bits for dtype in heads]


def test_every_format_of_a_state_has_a_ladder_that_ends() -> None:
    assert set(LADDERS) == set(STATE_DTYPES)
    for dtype, ladder in LADDERS.items():
        assert ladder[-1] == ("fp32", math.inf)
        assert dtype == ladder[0][0]


@pytest.mark.parametrize("dtype", STATE_DTYPES)
@pytest.mark.parametrize("window", [1, 4, 8, 16])
def test_a_head_that_remembers_longer_or_is_written_more_often_is_never_narrower(
    dtype: str, window: int
) -> None:
    heads = choose_heads(LIVES, dtype, window)
    assert bits(heads) == sorted(bits(heads))
    assert heads[0] == dtype
    seldom = bits(choose_heads(LIVES, dtype, 2 * window))
    assert all(later <= now for later, now in zip(seldom, bits(heads), strict=True))


@pytest.mark.parametrize(("dtype", "bound"), [("int8", 0.01), ("fp8", 0.02), ("int4", 0.05)])
def test_heads_of_10000_tokens_and_more_stay_far_inside_the_bounds(dtype: str, bound: float) -> None:
    long = LIVES[LIVES >= 10_000]
    for window in (1, 8, 16):
        for head, life in zip(choose_heads(long, dtype, window), long, strict=True):
            assert predicted_error(life[None], head, window).item() <= bound / 2


@pytest.mark.parametrize(("dtype", "most"), [("int4", 5.3), ("int8", 9.0), ("fp8", 9.0)])
def test_a_fresh_model_keeps_near_the_bits_of_its_format(dtype: str, most: float) -> None:
    # As mamba_ssm initialises Mamba2: A uniform in 1 to 16, dt log-uniform in 0.001 to 0.1.
    random = torch.Generator().manual_seed(0)
    A = -1 - 15 * torch.rand(20_000, generator=random)
    dt = 0.001 * 100 ** torch.rand(20_000, generator=random)
    chosen = bits(choose_heads(half_lives(A, dt), dtype, RECOMMENDED[dtype][1]))
    assert sum(chosen) / len(chosen) <= most


@pytest.mark.parametrize("dtype", ["int4", "fp8", "int8", "fp16"])
@pytest.mark.parametrize("half_life", [1.0, 30.0, 200.0])
def test_random_inputs_leave_the_error_that_is_predicted(dtype: str, half_life: float) -> None:
    window, rows = 8, 16
    kept = 2.0 ** (-window / half_life)
    random = torch.Generator().manual_seed(0)
    exact = torch.zeros(1, rows, 128, dtype=torch.float64)
    stored, found = exact.float(), []
    windows = max(60, int(8 * half_life / window))
    for count in range(windows):
        update = torch.randn(exact.shape, dtype=torch.float64, generator=random)
        exact = kept * exact + update
        keys = rounding_keys(0, torch.tensor([count]), torch.tensor([0]))
        stored = decode(*encode(kept * stored + update.float(), dtype, keys), dtype, 128)
        if count >= windows // 2:
            found.append(((stored - exact).norm() / exact.norm()).item())
    predicted = predicted_error(torch.tensor([half_life]), dtype, window).item()
    # A large error widens the range that int4's sixteen values cover, which the formula leaves out.
    assert sum(found) / len(found) == pytest.approx(predicted, rel=0.1 + predicted / 2)


def test_rounding_once_costs_what_the_recipe_assumes() -> None:
    state = torch.randn(4, 256, 128, generator=torch.Generator().manual_seed(0))
    heads = torch.arange(4)
    for dtype, error in ONE_SHOT.items():
        rounded = decode(*encode(state, dtype, rounding_keys(0, heads, heads)), dtype, 128)
        assert ((rounded - state).norm() / state.norm()).item() == pytest.approx(error, rel=0.03)


def test_half_lives_are_those_of_the_decay() -> None:
    A, dt = torch.tensor([-1.0, -16.0]), torch.tensor([0.1, 0.01])
    assert torch.exp(A * dt * half_lives(A, dt)).tolist() == pytest.approx([0.5, 0.5])
    A, dt = -torch.rand(5, 3) - 0.1, torch.rand(5)
    lives = half_lives(A, dt)  # Mamba-1: each row has its step size
    assert torch.exp(A * dt[:, None] * lives).flatten().tolist() == pytest.approx([0.5] * 15)


def test_a_head_of_many_rates_is_judged_by_all_of_them() -> None:
    mixed = torch.tensor([[2.0, 2.0, 2.0, 5_000.0]])
    each = predicted_error(mixed[0], "int8", 8)
    assert predicted_error(mixed, "int8", 8).item() == pytest.approx(each.square().mean().sqrt().item())
    assert len(choose_heads(mixed, "int8", 8)) == 1


def test_a_head_that_forgets_nothing_or_everything_has_a_format() -> None:
    heads = choose_heads(torch.tensor([math.inf, 0.0]), "int4", 8)
    assert heads == ("fp32", "int4")
