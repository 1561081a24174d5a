"""mamba_cli.sampling: which tokens can be chosen, how often, and that a seed decides."""

import math
import subprocess
import sys

import pytest
import torch

from mamba_cli.errors import Mamba2Error
from mamba_cli.sampling import SamplingParams, UniformNumbers, sample

OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
PROBABILITIES = torch.tensor([0.1, 0.4, 0.05, 0.25, 0.2])


def possible(params: SamplingParams, probabilities: torch.Tensor = PROBABILITIES, **arguments) -> set[int]:
    """Return the tokens that a fine grid of random numbers chooses."""
    uniform = torch.linspace(0, 1, 2001, dtype=torch.float64)[:-1]
    logits = probabilities.log().expand(len(uniform), -1)
    return set(sample(logits, params, len(probabilities), uniform, **arguments).tolist())


def test_temperature_zero_takes_the_likeliest_token_and_the_first_of_equals():
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, 1.0, 5.0]])
    assert sample(logits, SamplingParams(temperature=0), 3).tolist() == [1, 0]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1e-300, 1e300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padded_rows_are_never_chosen(temperature, dtype):
    logits = torch.zeros(64, 12, dtype=dtype)
    logits[:, 8:] = 1000.0
    uniform = torch.linspace(0, 1, 65, dtype=torch.float64)[:-1]
    params = SamplingParams(**OFF | {"temperature": temperature})
    assert sample(logits, params, 8, uniform).max() < 8


def test_the_frequencies_are_the_probabilities():
    uniform = torch.linspace(0, 1, 20001, dtype=torch.float64)[:-1]
    chosen = sample(PROBABILITIES.log().expand(20000, -1), SamplingParams(**OFF), 5, uniform)
    frequencies = torch.bincount(chosen, minlength=5) / 20000
    torch.testing.assert_close(frequencies, PROBABILITIES, atol=1e-4, rtol=0)


def test_temperature_divides_the_logits():
    uniform = torch.linspace(0, 1, 20001, dtype=torch.float64)[:-1]
    chosen = sample(
        PROBABILITIES.log().expand(20000, -1), SamplingParams(**OFF | {"temperature": 0.5}), 5, uniform
    )
    expected = PROBABILITIES**2 / (PROBABILITIES**2).sum()
    torch.testing.assert_close(torch.bincount(chosen, minlength=5) / 20000, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"top_k": 1}, {1}),
        ({"top_k": 3}, {1, 3, 4}),
        ({"top_k": 5}, {0, 1, 2, 3, 4}),
        ({"top_k": 1000}, {0, 1, 2, 3, 4}),
        ({"top_k": 0}, {0, 1, 2, 3, 4}),
        ({"top_p": 1e-9}, {1}),
        ({"top_p": 0.39}, {1}),
        ({"top_p": 0.41}, {1, 3}),
        ({"top_p": 0.8}, {1, 3, 4}),
        ({"top_p": 0.94}, {0, 1, 3, 4}),
        ({"min_p": 1.0}, {1}),
        ({"min_p": 0.6}, {1, 3}),
        ({"min_p": 0.2}, {0, 1, 3, 4}),
        # 0.4 / 0.65 of what top_k keeps is enough for 0.6, and 0.4 alone would not be.
        ({"top_k": 2, "top_p": 0.6}, {1}),
        # Temperature comes first: squared, the likeliest has 0.16 of 0.275, which reaches 0.55.
        ({"temperature": 0.5, "top_p": 0.55}, {1}),
    ],
)
def test_filters_keep_what_transformers_keeps(changed, expected):
    assert possible(SamplingParams(**OFF | changed)) == expected


def test_min_p_is_relative_to_each_rows_own_largest_probability():
    rows = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.97, 0.01, 0.01, 0.01]])
    for row, expected in zip(rows, ({0, 1, 2}, {0}), strict=True):
        assert possible(SamplingParams(**OFF | {"min_p": 0.3}), row) == expected


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_filters_agree_with_transformers_on_random_logits(scale):
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    torch.manual_seed(0)
    logits = torch.randn(3, 40) * scale
    previous = torch.randint(0, 40, (3, 7))
    chain = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.3),
            TemperatureLogitsWarper(0.7),
            TopKLogitsWarper(20),
            TopPLogitsWarper(0.9),
            MinPLogitsWarper(0.05),
        ]
    )
    expected = chain(previous, logits.clone()).softmax(-1)
    seen = torch.zeros(3, 40, dtype=torch.bool).scatter_(1, previous, True)
    uniform = torch.linspace(0, 1, 4001, dtype=torch.float64)[:-1]
    for row in range(3):
        chosen = sample(
            logits[row].expand(4000, -1), SamplingParams(1.3, 0.7, 20, 0.9, 0.05), 40, uniform, seen[row]
        )
        frequencies = torch.bincount(chosen, minlength=40) / 4000
        torch.testing.assert_close(frequencies, expected[row], atol=1e-3, rtol=0)


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits():
    logits = torch.tensor([[2.0, 1.9, -1.0], [-1.0, -1.1, -5.0]])
    seen = torch.tensor([[True, False, False], [True, False, False]])
    greedy = SamplingParams(temperature=0, repetition_penalty=1.2)
    assert sample(logits, greedy, 3, seen=seen).tolist() == [1, 1]
    assert sample(logits, greedy, 3, seen=~seen).tolist() == [0, 0]
    assert sample(logits, SamplingParams(temperature=0), 3, seen=seen).tolist() == [0, 0]


def test_rows_do_not_influence_each_other():
    torch.manual_seed(0)
    logits, uniform = torch.randn(6, 50) * 4, torch.rand(6, dtype=torch.float64)
    together = sample(logits, SamplingParams(), 50, uniform)
    alone = [sample(logits[i : i + 1], SamplingParams(), 50, uniform[i : i + 1]).item() for i in range(6)]
    assert together.tolist() == alone


def test_the_largest_random_number_chooses_a_token_of_some_probability():
    uniform = torch.tensor([math.nextafter(1.0, 0.0), 0.0], dtype=torch.float64)
    logits = torch.tensor([[-math.inf, 0.1, 0.2, -math.inf]]).expand(2, -1)
    assert sample(logits, SamplingParams(**OFF), 4, uniform).tolist() == [2, 1]


def test_random_numbers_depend_on_the_seed_and_the_sample_alone():
    three, one = UniformNumbers(7, 3), UniformNumbers(7, 1)
    drawn = torch.cat([three.draw(2), three.draw(3)])
    assert torch.equal(drawn[:, :1], one.draw(5))
    assert len(set(drawn.flatten().tolist())) == 15
    assert not torch.equal(UniformNumbers(8, 1).draw(5), drawn[:, :1])
    assert drawn.min() >= 0 and drawn.max() < 1


def test_random_numbers_stay_the_same_in_every_version():
    assert UniformNumbers(1234, 1).draw(2).flatten().tolist() == [0.6967616873191794, 0.4574985909203597]


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"top_p": math.nan},
        {"min_p": -0.01},
        {"min_p": 1.01},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": math.nan},
    ],
)
def test_values_out_of_range_are_refused_by_name(values):
    (name,) = values
    with pytest.raises(Mamba2Error, match=f"^{name}: expected .*, got "):
        SamplingParams(**values)


def test_nothing_waits_for_values():
    # A tensor without values raises where a program asks for one, as a graph capture would.
    logits = torch.empty(4, 60, device="meta", dtype=torch.bfloat16)
    uniform = torch.empty(4, device="meta", dtype=torch.float64)
    seen = torch.empty(4, 50, device="meta", dtype=torch.bool)
    for params in (SamplingParams(1.1, 0.8, 20, 0.9, 0.1), SamplingParams(1.1, 0.0)):
        chosen = sample(logits, params, 50, uniform, seen)
        assert chosen.shape == (4,) and chosen.dtype == torch.int64


def test_reading_the_defaults_does_not_import_torch():
    code = "import sys, mamba_cli.sampling; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}).returncode == 0
    )
