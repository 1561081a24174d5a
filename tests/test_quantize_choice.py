"""Which format each head gets: by its memory, and wider where a layer is sensitive, until a target is met."""

import math

import torch

from mamba_cli.perplexity.plan import make_plan
from mamba_cli.perplexity.tokens import Document
from mamba_cli.quantize.report import measure_losses
from mamba_cli.quantize.saved import Scales
from mamba_cli.quantize.sensitivity import can_widen, measure_layers, only, reach, widen
from mamba_cli.quantize.study import Request, choose, formats_beside
from mamba_cli.state_format import StateFormat, layer_seed
from mamba_commands.output import Output
from mamba_kernels.packed_state import LayerFormat
from model_testing import BASE, hybrid, make, variant
from perplexity_testing import NumberTokenizer

IDS = torch.randint(BASE.vocab_size, (90,), generator=torch.Generator().manual_seed(0))


def some_format(config, *heads: str, window: int = 2) -> StateFormat:
    layers = tuple(
        None
        if index in config.attn_layer_idx
        else LayerFormat(tuple(heads), "stochastic", window, layer_seed(0, index))
        for index in range(config.n_layer)
    )
    return StateFormat(layers=layers, name="test")


def lively(config=BASE):
    """A model whose logits move with its state, and a plan on it."""
    lm = make(config)
    lm.model.head.weight.mul_(30)
    return lm, make_plan([Document(IDS, "", False)], NumberTokenizer(), "step", 30)


def test_a_head_is_chosen_by_the_longer_of_its_half_lives_on_the_text_and_by_the_weights(monkeypatch):
    lm, plan = lively(hybrid())

    def lives(*heads: float) -> list[torch.Tensor | None]:
        return [None if layer in lm.config.attn_layer_idx else torch.tensor(heads) for layer in range(3)]

    monkeypatch.setattr(type(lm), "half_lives", lambda lm: lives(1.0, 1000.0, 1.0, math.inf))
    nothing = (None,) * lm.config.n_layer
    measured = Scales(tuple(lives(1.0, 1.0, 1000.0, 1.0)), nothing, nothing)
    monkeypatch.setattr("mamba_cli.quantize.study.calibrate", lambda *arguments: measured)
    choice = choose(lm, plan, Request("int8", sensitivity_tokens=0), Output().progress)
    assert [layer and layer.heads for layer in choice.format.layers] == [
        ("int8", "fp16", "fp16", "fp32"),
        None,
        ("int8", "fp16", "fp16", "fp32"),
    ]
    assert choice.scales == measured  # what is shown and kept is the text's
    beside = formats_beside(lm, choice, ["int8"], 0)
    assert beside["int8"][0] == choice.format


def test_one_layer_alone_leaves_the_others_in_fp32():
    format = only(some_format(hybrid(), "int8", "int4", "fp8", "int8"), 2)
    assert [layer and layer.heads for layer in format.layers] == [
        ("fp32",) * 4,
        None,
        ("int8", "int4", "fp8", "int8"),
    ]


def test_widening_moves_each_head_one_step_and_ends_at_16_bits():
    format = some_format(BASE, "int4", "int8", "fp8", "fp32")
    once, twice = widen(format, 1), widen(widen(format, 1), 1)
    assert once.layers[1].heads == ("int8", "fp16", "fp16", "fp32")
    assert twice.layers[1].heads == ("fp16", "fp16", "fp16", "fp32")
    assert twice.layers[0] == format.layers[0]
    assert can_widen(once, 1) and not can_widen(twice, 1)


def test_the_sensitivity_of_a_layer_is_its_loss_alone():
    config = variant(n_layer=10)
    lm, plan = lively(config)
    format = some_format(config, *["int4"] * 4)
    found = measure_layers(lm.with_state, format, lm, plan)
    assert [layer.layer for layer in found] == list(range(10))
    [alone] = measure_losses([lm.with_state(only(format, 9))], lm, plan)
    assert (found[9].kl, found[9].nll_change) == (alone.kl, alone.nll_change)


def test_the_most_sensitive_layers_are_widened_until_the_target_is_met():
    lm, plan = lively()
    format = some_format(BASE, *["int4"] * 4)
    layers = measure_layers(lm.with_state, format, lm, plan)
    [first] = measure_losses([lm.with_state(format)], lm, plan)
    reached = reach(first.change - 1e-9, lm.with_state, format, layers, lm, plan)
    assert reached.layers[0] == max(layers, key=lambda layer: layer.kl).layer
    assert reached.met == (reached.loss.change <= first.change - 1e-9)
    assert reached.format != format


def test_a_target_out_of_reach_says_what_was_reached():
    lm, plan = lively()
    format = some_format(BASE, *["int8"] * 4)
    layers = measure_layers(lm.with_state, format, lm, plan)
    reached = reach(-0.9, lm.with_state, format, layers, lm, plan)
    assert not reached.met
    assert {layer.heads for layer in reached.format.layers} == {("fp16",) * 4}
    assert sorted(reached.layers) == [0, 1]
