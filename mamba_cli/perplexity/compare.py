"""A model beside its reference: how far the predictions moved, and whether that is more than noise."""

import math
from dataclasses import dataclass

import torch

from mamba_cli.perplexity.evaluate import Scores
from mamba_cli.perplexity.plan import Plan
from mamba_cli.perplexity.statistics import exact_sum, percentiles, perplexity, standard_error

PERCENTILES = (50.0, 90.0, 95.0, 99.0, 99.9, 100.0)


@dataclass(frozen=True)
class Comparison:
    """Figures over all predictions; `None` where a value is infinite or one block gives no error.

    nll_mean: the reference's mean NLL. nll_difference: the model's mean NLL less the reference's, and
    its standard error from the differences token by token: far smaller than either model's own, as
    both read the same text. nll_change: the mean of the absolute differences. kl_*: KL(reference ||
    model) in nats; kl_percentiles: by percent, 100 being the greatest. probability_*: of the true
    token, the model's less the reference's. same_top: share of predictions whose most probable token
    is the same.
    """

    nll_sum: float
    nll_mean: float
    perplexity: float
    nll_difference: float
    nll_difference_stderr: float | None
    nll_change: float
    kl_mean: float
    kl_stderr: float | None
    kl_percentiles: dict[float, float]
    probability_change_mean: float
    probability_change_rms: float
    probability_change_percentiles: dict[float, float]
    same_top: float


def compare(scores: Scores, plan: Plan) -> Comparison:
    """Summarise scores that were made with a reference."""
    assert scores.reference_nll is not None and scores.kl is not None and scores.same_top is not None
    tokens = plan.predictions
    difference = scores.nll - scores.reference_nll
    # Two infinite NLLs are equally bad, not NaN.
    difference = torch.where(scores.nll == scores.reference_nll, 0.0, difference)
    change = (-scores.nll).exp() - (-scores.reference_nll).exp()
    nll_sum = exact_sum(scores.reference_nll)
    return Comparison(
        nll_sum=nll_sum,
        nll_mean=nll_sum / tokens,
        perplexity=perplexity(nll_sum / tokens),
        nll_difference=exact_sum(difference) / tokens,
        nll_difference_stderr=standard_error(difference, plan.blocks),
        nll_change=exact_sum(difference.abs()) / tokens,
        kl_mean=exact_sum(scores.kl) / tokens,
        kl_stderr=standard_error(scores.kl, plan.blocks),
        kl_percentiles=_by_percent(scores.kl, PERCENTILES),
        probability_change_mean=exact_sum(change) / tokens,
        probability_change_rms=math.sqrt(exact_sum(change.square()) / tokens),
        probability_change_percentiles=_by_percent(change, (0.0, 1.0, 5.0, 50.0, 95.0, 99.0, 100.0)),
        same_top=float(scores.same_top.double().mean()),
    )


def _by_percent(values: torch.Tensor, points: tuple[float, ...]) -> dict[float, float]:
    return dict(zip(points, percentiles(values, points), strict=True))
