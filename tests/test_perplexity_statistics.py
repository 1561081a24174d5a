"""The figures, against arithmetic done another way."""

import math
import statistics

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mamba_cli.perplexity.statistics import (
    by_context,
    count_words,
    exact_sum,
    percentiles,
    perplexity,
    standard_error,
)

NLLS = st.lists(st.floats(0, 50), min_size=1, max_size=60)


@given(NLLS)
def test_a_sum_depends_on_no_order(values):
    forwards = torch.tensor(values, dtype=torch.float64)
    assert exact_sum(forwards) == exact_sum(forwards.flip(0)) == math.fsum(values)


def test_an_infinite_nll_makes_an_infinite_sum_and_no_error_bar():
    values = torch.tensor([1.0, math.inf, 2.0, 1.0]).double()
    assert exact_sum(values) == math.inf
    assert standard_error(values, [2, 2]) is None


def test_perplexity_past_the_largest_float_is_infinite():
    assert perplexity(1000.0) == math.inf
    assert perplexity(math.inf) == math.inf
    assert perplexity(0.0) == 1.0


def test_blocks_of_one_token_give_the_textbook_standard_error():
    values = torch.rand(200, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = statistics.stdev(values.tolist()) / math.sqrt(200)
    assert standard_error(values, [1] * 200) == pytest.approx(expected)


def test_equal_blocks_give_the_standard_error_of_their_means():
    values = torch.rand(200, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    means = values.reshape(20, 10).mean(1).tolist()
    assert standard_error(values, [10] * 20) == pytest.approx(statistics.stdev(means) / math.sqrt(20))


def test_the_standard_error_covers_the_truth_about_as_often_as_it_says():
    # Correlated tokens: each block of 16 shares an offset, which errors over single tokens would miss.
    generator = torch.Generator().manual_seed(0)
    covered = 0
    for _ in range(200):
        blocks = torch.randn(40, 1, generator=generator) + torch.randn(40, 16, generator=generator)
        values = blocks.flatten().double()
        error = standard_error(values, [16] * 40)
        covered += abs(values.mean().item()) < 2 * error
    assert 180 <= covered <= 200


def test_one_block_has_no_standard_error():
    assert standard_error(torch.ones(5).double(), [5]) is None


def test_words_are_counted_on_the_original_page_by_the_harness_rule():
    # White space at the ends of a page leaves an empty word at each end.
    assert count_words([" = Title = \n A @-@ b . \n"]) == 9
    assert count_words(["one two", "three"]) == 3


@given(st.lists(st.integers(1, 300), min_size=1, max_size=6), st.integers(0, 100))
def test_position_buckets_are_powers_of_two_and_keep_every_value(sizes, shift):
    contexts = [range(1 + shift, 1 + shift + size) for size in sizes]
    values = torch.rand(sum(sizes), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    buckets = by_context(values, contexts)
    assert sum(bucket.tokens for bucket in buckets) == len(values)
    assert sum(bucket.tokens * bucket.mean for bucket in buckets) == pytest.approx(values.sum().item())
    positions = [position for context in contexts for position in context]
    for bucket in buckets:
        assert bucket.last == 2 * bucket.first - 1
        inside = [
            v for v, p in zip(values.tolist(), positions, strict=True) if bucket.first <= p <= bucket.last
        ]
        assert bucket.tokens == len(inside)
        assert bucket.mean == pytest.approx(statistics.mean(inside))


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=50), st.floats(0, 100))
def test_percentiles_are_numpys(values, point):
    ours = percentiles(torch.tensor(values, dtype=torch.float64), [point])[0]
    assert ours == pytest.approx(numpy.percentile(values, point), abs=1e-9)
