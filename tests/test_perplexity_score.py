"""Each NLL is the one that the definition gives, in every mode, batch and slice."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_cli.errors import Mamba2Error
from mamba_cli.load import random_model
from mamba_cli.perplexity import score
from mamba_cli.perplexity.evaluate import evaluate
from mamba_cli.perplexity.plan import make_plan
from mamba_cli.perplexity.statistics import perplexity
from mamba_cli.weights import random_tensors
from model_testing import BASE, VARIANTS, make
from oracle import oracle_logits
from perplexity_testing import (
    ROWS,
    TABLE,
    VOCAB,
    FollowingModel,
    NumberTokenizer,
    StandIn,
    documents,
    expected_nlls,
    random_stand_in,
    some_ids,
)

TOKENIZER = NumberTokenizer()


def nlls(model, *ids, mode="window", window=8, stride=None, batch_size=None) -> list[float]:
    plan = make_plan(documents(*ids), TOKENIZER, mode, window, stride)
    return evaluate(model, plan, batch_size).nll.tolist()


@given(
    st.integers(2, 40), st.integers(1, 12), st.data(), st.sampled_from(["window", "step"]), st.integers(1, 5)
)
@settings(max_examples=60, deadline=None)
def test_every_token_has_the_nll_of_its_own_context(length, window, data, mode, batch_size):
    stride = data.draw(st.integers(1, window))
    model, ids = random_stand_in(), some_ids(length)
    found = nlls(model, ids, mode=mode, window=window, stride=stride, batch_size=batch_size)
    assert found == pytest.approx(expected_nlls(model, ids, window, stride), abs=1e-5)


@given(st.integers(2, 40), st.integers(1, 12))
@settings(max_examples=30, deadline=None)
def test_carrying_the_state_gives_every_token_the_whole_document(length, chunk):
    model, ids = random_stand_in(), some_ids(length)
    found = nlls(model, ids, mode="carry", window=chunk)
    assert found == pytest.approx(expected_nlls(model, ids, length, length), abs=1e-5)


@pytest.mark.parametrize("mode", ["window", "carry", "step"])
@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_documents_of_any_length_do_not_touch_each_other(mode, batch_size):
    model = random_stand_in()
    # Id 0 is what pads the shorter rows, and it occurs in the text as well.
    ids = [some_ids(3), [0, 0, 0, 5, 0], some_ids(20, 1), some_ids(9, 2), [4, 0]]
    window = 100 if mode == "carry" else 8
    expected = [nll for each in ids for nll in expected_nlls(model, each, window, window)]
    found = nlls(model, *ids, mode=mode, batch_size=batch_size)
    assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("mode", ["window", "carry", "step"])
def test_a_uniform_model_has_the_vocabulary_as_its_perplexity(mode):
    # Padded rows hold logits of 50: counted, they would change everything.
    found = nlls(StandIn(torch.zeros(TABLE, ROWS)), some_ids(30), mode=mode)
    assert perplexity(math.fsum(found) / 29) == pytest.approx(VOCAB, rel=1e-14)


def test_a_model_that_knows_the_next_token_has_perplexity_one():
    ids = [place % VOCAB for place in range(30)]
    assert nlls(FollowingModel(200.0), ids) == [0.0] * 29
    assert min(nlls(FollowingModel(200.0), ids[::-1])) == pytest.approx(200.0)


def test_an_nll_past_every_exponent_is_still_finite():
    found = nlls(FollowingModel(1000.0), [5] * 10)
    assert found == pytest.approx([1000.0 + math.log(1)] * 9)


def test_half_precision_logits_are_summed_in_single_precision():
    model = random_stand_in()
    model.table = (model.table * 20).half()
    assert nlls(model, some_ids(30)) == pytest.approx(expected_nlls(model, some_ids(30), 8, 8), abs=1e-6)


def test_nan_logits_are_an_error_that_names_the_token():
    model = FollowingModel(1.0)
    honest = model.logits
    model.logits = lambda hidden: honest(hidden).where(hidden != 7, torch.nan)
    with pytest.raises(Mamba2Error, match="NaN where token 4 of document 1 is predicted") as error:
        nlls(model, [1, 2, 3], [1, 2, 3, 7, 5], window=2)
    assert "inspect --check" in error.value.hint


def test_only_predictions_that_count_reach_the_head_and_in_slices(monkeypatch):
    monkeypatch.setitem(score.SLICE_ROWS, "cpu", 5)
    model, ids = random_stand_in(), some_ids(41)
    found = nlls(model, ids, window=16, stride=4, batch_size=3)
    assert found == pytest.approx(expected_nlls(model, ids, 16, 4), abs=1e-5)
    assert max(model.head_rows) <= 5
    assert sum(model.head_rows) == 40


def test_carrying_reads_one_chunk_at_a_time():
    model = random_stand_in()
    nlls(model, some_ids(23), mode="carry", window=5)
    assert model.calls == [(1, 5)] * 4 + [(1, 2)]


@pytest.mark.parametrize("mode", ["window", "carry", "step"])
@pytest.mark.parametrize("name", ["plain", "hybrid"])
def test_every_mode_agrees_with_the_float64_recurrence(name, mode):
    config = VARIANTS[name]
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(config.vocab_size, (41,), generator=generator)
    size = 40 if mode == "carry" else 16
    expected = []
    for start in range(0, 40, size):
        piece = ids[start : start + size + 1]
        logits = oracle_logits(config, random_tensors(config), piece[None, :-1])[0, :, : config.vocab_size]
        expected += (logits.logsumexp(-1) - logits.gather(1, piece[1:, None])[:, 0]).tolist()
    plan = make_plan(documents(ids.tolist()), TOKENIZER, mode, 16)
    for batch_size in (1, 2):
        found = evaluate(make(config), plan, batch_size).nll
        assert found.tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["window", "carry", "step"])
def test_a_gpu_gives_the_cpus_numbers(mode):
    ids = torch.randint(BASE.vocab_size, (300,), generator=torch.Generator().manual_seed(3)).tolist()
    plan = make_plan(documents(ids, ids[:17]), TOKENIZER, mode, 64, None if mode == "carry" else 48)
    here = evaluate(random_model(BASE, "cpu"), plan).nll
    there = evaluate(random_model(BASE, "cuda"), plan).nll
    assert there.tolist() == pytest.approx(here.tolist(), rel=1e-4)
