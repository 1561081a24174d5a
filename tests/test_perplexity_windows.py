"""Every token but the first is scored exactly once, whatever window and stride."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mamba_cli.errors import Mamba2Error
from mamba_cli.perplexity.windows import (
    Window,
    context_lengths,
    offsets,
    pack_batches,
    plan_windows,
)

LENGTHS = st.lists(st.integers(0, 60), max_size=5)


@st.composite
def shapes(draw) -> tuple[int, int]:
    window = draw(st.integers(1, 30))
    return window, draw(st.integers(1, window))


@given(LENGTHS, shapes())
def test_each_prediction_counts_exactly_once_and_in_reading_order(lengths, shape):
    plan = plan_windows(lengths, *shape)
    scored = [(w.document, place) for w in plan for place in range(w.scored, w.stop)]
    assert scored == [(d, place) for d, length in enumerate(lengths) for place in range(length - 1)]


@given(LENGTHS, shapes())
def test_a_window_reads_at_most_its_length_and_starts_at_a_multiple_of_the_stride(lengths, shape):
    window, stride = shape
    for w in plan_windows(lengths, window, stride):
        assert 1 <= w.length <= window
        assert w.start % stride == 0
        assert w.start <= w.scored < w.stop <= lengths[w.document] - 1


@given(st.integers(2, 200), shapes())
def test_after_the_first_window_a_prediction_has_at_least_window_less_stride_tokens_before(length, shape):
    window, stride = shape
    for w in plan_windows([length], window, stride)[1:]:
        assert min(context_lengths([w])[0]) == window - stride + 1


def test_windows_of_stride_equal_to_the_window_share_one_token():
    # Tokens 0..20481: 40 windows of 512 inputs, the last target of each being the next one's first input.
    plan = plan_windows([20481], 512)
    assert len(plan) == 40
    assert plan[0] == Window(0, 0, 512, 0)
    assert plan[1] == Window(0, 512, 1024, 512)
    assert sum(w.predictions for w in plan) == 20480


def test_a_stride_of_half_a_window():
    plan = plan_windows([23], 8, 4)
    assert [(w.start, w.stop, w.scored) for w in plan] == [
        (0, 8, 0),
        (4, 12, 8),
        (8, 16, 12),
        (12, 20, 16),
        (16, 22, 20),
    ]


def test_without_a_window_a_document_is_read_at_once():
    assert plan_windows([5, 1, 0, 3], None) == [Window(0, 0, 4, 0), Window(3, 0, 2, 0)]


@given(LENGTHS, shapes(), st.integers(1, 9))
def test_batches_hold_each_window_once_longest_first(lengths, shape, batch_size):
    plan = plan_windows(lengths, *shape)
    batches = pack_batches(plan, batch_size)
    order = [index for batch in batches for index in batch]
    assert sorted(order) == list(range(len(plan)))
    sizes = [plan[index].length for index in order]
    assert sizes == sorted(sizes, reverse=True)
    assert all(len(batch) == batch_size for batch in batches[:-1])


@given(LENGTHS, shapes())
def test_offsets_and_contexts_describe_the_flat_list_of_predictions(lengths, shape):
    plan = plan_windows(lengths, *shape)
    starts, contexts = offsets(plan), context_lengths(plan)
    assert starts[-1] == sum(max(length - 1, 0) for length in lengths)
    for w, first, last, context in zip(plan, starts, starts[1:], contexts, strict=False):
        assert last - first == w.predictions == len(context)
        assert context.start == w.scored - w.start + 1
        assert context.stop - 1 == w.length


@pytest.mark.parametrize(("window", "stride"), [(0, None), (8, 9), (8, 0), (-1, None)])
def test_windows_and_strides_that_would_lose_tokens_are_refused(window, stride):
    with pytest.raises(Mamba2Error, match="expected"):
        plan_windows([10], window, stride)


def test_a_batch_of_nothing_is_refused():
    with pytest.raises(Mamba2Error, match="batch size: expected at least 1, got 0"):
        pack_batches([], 0)
