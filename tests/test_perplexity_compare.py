"""A model beside its reference, in one pass, against figures made from whole probability tables."""

import math

import pytest
import torch

from mamba_cli.errors import Mamba2Error
from mamba_cli.perplexity.compare import compare
from mamba_cli.perplexity.evaluate import evaluate, evaluate_each
from mamba_cli.perplexity.plan import make_plan
from model_testing import BASE
from perplexity_testing import (
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

IDS = some_ids(60)


def plan(mode="window"):
    return make_plan(documents(IDS), NumberTokenizer(), mode, 8)


def compared(model: StandIn, reference: StandIn, mode="window"):
    return compare(evaluate(model, plan(mode), 2, reference), plan(mode))


def table_of(model: StandIn) -> torch.Tensor:
    """Log-probabilities (predictions, VOCAB) in float64, by the definition."""
    sums = [
        sum(IDS[first : last + 1]) for first in range(0, 59, 8) for last in range(first, min(first + 8, 59))
    ]
    return model.table[torch.tensor(sums) % TABLE, :VOCAB].double().log_softmax(-1)


@pytest.mark.parametrize("mode", ["window", "step"])
def test_the_figures_are_those_of_the_whole_probability_tables(mode):
    model, reference = random_stand_in(0), random_stand_in(1)
    p, q = table_of(model), table_of(reference)
    kl = (q.exp() * (q - p)).sum(-1)
    wanted = torch.tensor(IDS[1:])[:, None]
    change = (p.gather(1, wanted).exp() - q.gather(1, wanted).exp())[:, 0]
    found = compared(model, reference, mode)
    assert found.kl_mean == pytest.approx(kl.mean().item(), rel=1e-5)
    assert found.kl_percentiles[50.0] == pytest.approx(kl.quantile(0.5).item(), rel=1e-5)
    assert found.kl_percentiles[100.0] == pytest.approx(kl.max().item(), rel=1e-5)
    assert found.same_top == pytest.approx((p.argmax(-1) == q.argmax(-1)).double().mean().item())
    assert found.probability_change_mean == pytest.approx(change.mean().item(), abs=1e-6)
    assert found.probability_change_rms == pytest.approx(change.square().mean().sqrt().item(), abs=1e-6)
    ours, theirs = expected_nlls(model, IDS, 8, 8), expected_nlls(reference, IDS, 8, 8)
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    assert found.nll_difference == pytest.approx(sum(differences) / 59, abs=1e-6)
    assert found.nll_change == pytest.approx(sum(map(abs, differences)) / 59, abs=1e-6)
    assert found.perplexity == pytest.approx(math.exp(sum(theirs) / 59), rel=1e-6)


def test_a_model_beside_itself_differs_in_nothing():
    found = compared(random_stand_in(), random_stand_in())
    assert found.kl_mean == found.nll_difference == found.nll_difference_stderr == found.nll_change == 0
    assert found.probability_change_rms == 0
    assert found.same_top == 1


@pytest.mark.parametrize("mode", ["window", "carry", "step"])
def test_several_models_beside_one_reference_score_as_each_alone(mode):
    models, reference = [random_stand_in(seed) for seed in (0, 2, 3)], random_stand_in(1)
    together = evaluate_each(models, plan(mode), 2, reference)
    for model, found in zip(models, together, strict=True):
        alone = evaluate(model, plan(mode), 2, reference)
        for field in ("nll", "reference_nll", "kl", "same_top"):
            assert torch.equal(getattr(found, field), getattr(alone, field))


def test_a_divergence_below_single_precision_is_measured_not_rounded_away():
    model, reference = random_stand_in(), random_stand_in()
    noise = torch.randn(model.table.shape, generator=torch.Generator().manual_seed(5)) * 1e-3
    model.table += noise
    exact = table_of(model)
    q = table_of(reference)
    kl = (q.exp() * (q - exact)).sum(-1).mean().item()
    assert kl < 1e-6
    assert compared(model, reference).kl_mean == pytest.approx(kl, rel=0.01)


def test_the_paired_error_is_far_below_the_error_of_either_model():
    model, reference = random_stand_in(), random_stand_in()
    model.table += torch.randn(model.table.shape, generator=torch.Generator().manual_seed(5)) * 1e-2
    scores = evaluate(model, plan(), reference=reference)
    from mamba_cli.perplexity.statistics import standard_error

    alone = standard_error(scores.nll, plan().blocks)
    assert compare(scores, plan()).nll_difference_stderr < alone / 20


def test_certainty_where_the_reference_is_certain_of_another_token_is_not_nan():
    found = compared(FollowingModel(1000.0), random_stand_in())
    assert math.isfinite(found.kl_mean)
    assert found.nll_difference > 100


def test_a_reference_of_another_vocabulary_is_refused():
    import dataclasses

    reference = random_stand_in()
    reference.config = dataclasses.replace(BASE, vocab_size=VOCAB + 1)
    with pytest.raises(Mamba2Error, match=f"expected the model's vocabulary of {VOCAB}, got {VOCAB + 1}"):
        compared(random_stand_in(), reference)
