"""The figures of quantize-state against their definitions: loss, error by position, calibration, bytes."""

import dataclasses
import math

import pytest
import torch

from mamba_cli.load import random_model
from mamba_cli.perplexity.evaluate import Scores
from mamba_cli.perplexity.plan import Plan, make_plan
from mamba_cli.quantize.calibrate import BLOCK, COLUMN_RANGE, built_in_text, calibrate
from mamba_cli.quantize.report import (
    Position,
    by_position,
    growth,
    loss,
    measure_cost,
    measure_losses,
    state_bytes,
)
from model_testing import BASE, hybrid, make, variant
from perplexity_testing import NumberTokenizer, documents, random_stand_in, some_ids


def plan_of(tokens: int, window: int, vocab: int = 11) -> Plan:
    ids = torch.randint(vocab, (tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    return make_plan(documents(ids), NumberTokenizer(), "step", window)


def scores_of(plan: Plan, change: torch.Tensor, kl: torch.Tensor | None = None) -> Scores:
    reference = torch.rand(plan.predictions, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    kl = torch.zeros_like(reference) if kl is None else kl
    same = torch.ones(plan.predictions, dtype=torch.bool)
    return Scores(reference + change, reference, kl, same, 1, 1.0, 1.0)


def test_the_loss_is_the_change_of_perplexity_with_its_paired_error():
    plan = plan_of(401, 100)
    change = torch.full((400,), 0.01, dtype=torch.float64)
    change[::2] = -0.03
    found = loss(scores_of(plan, change), plan)
    assert found.change == pytest.approx(math.expm1(-0.01))
    assert found.change_stderr == pytest.approx(0.0, abs=1e-12)  # every window has the same mean change
    assert found.nll_change == pytest.approx(0.02)
    assert found.same_top == 1


def test_one_window_leaves_no_error_to_estimate():
    plan = plan_of(65, 100)
    assert loss(scores_of(plan, torch.zeros(64, dtype=torch.float64)), plan).change_stderr is None


def test_positions_are_64_tokens_and_twice_as_far_each_time():
    plan = plan_of(301, 300)
    read = torch.arange(1, 301, dtype=torch.float64)
    found = by_position(scores_of(plan, -read, 2 * read), plan)
    assert [(one.first, one.last, one.tokens) for one in found] == [
        (1, 64, 64),
        (65, 128, 64),
        (129, 256, 128),
        (257, 512, 44),
    ]
    assert [one.nll_change for one in found] == pytest.approx([32.5, 96.5, 192.5, 278.5])
    assert [one.kl for one in found] == pytest.approx([65.0, 193.0, 385.0, 557.0])


def test_positions_count_from_each_windows_start():
    plan = plan_of(201, 100)
    found = by_position(scores_of(plan, torch.ones(200, dtype=torch.float64)), plan)
    assert [(one.first, one.tokens) for one in found] == [(1, 128), (65, 72)]


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_growth_is_the_power_of_the_position(power):
    positions = [
        Position(2**k + 1, 2 ** (k + 1), 2**k, 0.003 * math.sqrt((2**k + 1) * 2 ** (k + 1)) ** power, 0.0)
        for k in range(6, 12)
    ]
    assert growth(positions) == pytest.approx(power, abs=1e-9)


def test_growth_is_none_where_there_is_nothing_to_fit():
    assert growth([Position(1, 64, 64, 0.1, 0.1)]) is None
    assert growth([Position(1, 64, 64, 0.0, 0.0), Position(65, 128, 64, 0.0, 0.0)]) is None


def test_several_formats_are_scored_beside_one_reference():
    models, reference = [random_stand_in(seed) for seed in (0, 2)], random_stand_in(1)
    plan = make_plan(documents(some_ids(60)), NumberTokenizer(), "step", 16)
    together = measure_losses(models, reference, plan)
    assert together == [measure_losses([model], reference, plan)[0] for model in models]
    assert together[0] != together[1]
    assert measure_losses([], reference, plan) == []


@pytest.mark.parametrize("name", ["mamba2", "hybrid", "dt_limited"])
def test_half_lives_are_those_of_the_mean_step_size_on_the_text(name):
    config = {"mamba2": BASE, "hybrid": hybrid(), "dt_limited": variant(dt_limit=(0.01, 0.05))}[name]
    lm = make(config)
    plan = plan_of(2 * BLOCK + 40, 150, config.vocab_size)
    found = calibrate(lm, plan)
    # The first layer reads the normed embedding: its dt can be had without the code under test.
    mixer, norm = lm.model.blocks[0].mixer, lm.model.blocks[0].norm
    ids = plan.documents[0].ids[:-1]
    u = norm(lm.model.embedding[ids][None], None)[0]
    dt = torch.nn.functional.softplus(mixer.in_proj(u)[0, :, -config.nheads :] + mixer.dt_bias)
    dt = dt.clamp(*config.dt_limit).double().mean(0)
    expected = math.log(2) / (dt * mixer.A_log.double().exp())
    torch.testing.assert_close(found.half_lives[0].double(), expected, rtol=1e-5, atol=0)
    for index in range(config.n_layer):
        kinds = (found.half_lives[index], found.columns[index], found.conv[index])
        assert all((kind is None) == (index in config.attn_layer_idx) for kind in kinds)


def test_half_lives_of_mamba1_are_of_each_channel_and_state():
    config = variant(
        layer="Mamba1", headdim=1, ngroups=1, rmsnorm=False, dt_rank=4, d_state=8, chunk_size=256
    )
    lm = make(config)
    plan = plan_of(100, 64, config.vocab_size)
    found = calibrate(lm, plan)
    assert found.half_lives[0].shape == (config.d_inner, config.d_state)
    assert found.columns[0].shape == (1, config.d_state)
    assert found.conv[0].shape == (config.d_inner,)
    # A is the same for all channels of one state, so a channel's half-lives go as 1 / |A|.
    mixer = lm.model.blocks[0].mixer
    products = found.half_lives[0] * mixer.A.abs()
    torch.testing.assert_close(products, products[:, :1].expand_as(products))


def test_calibration_leaves_the_model_as_it_was():
    lm = make(BASE)
    ids = torch.randint(BASE.vocab_size, (1, 20), generator=torch.Generator().manual_seed(3))
    before, mixers = lm(ids), [block.mixer for block in lm.model.blocks]
    calibrate(lm, plan_of(50, 32, BASE.vocab_size))
    assert [block.mixer for block in lm.model.blocks] == mixers
    assert torch.equal(lm(ids), before)


def test_column_scales_average_to_one_and_keep_within_their_range():
    columns = calibrate(make(BASE), plan_of(300, 300, BASE.vocab_size)).columns[0]
    assert columns.shape == (BASE.nheads, BASE.d_state)
    torch.testing.assert_close(columns.log().mean(-1), torch.zeros(BASE.nheads), atol=1e-4, rtol=0)
    assert columns.max() <= COLUMN_RANGE and columns.min() >= 1 / COLUMN_RANGE


def test_state_bytes_are_those_of_the_storages_and_each_counts_once():
    lm = make(BASE)
    state = lm.init_state(3)
    exact = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for layer in state.layers
        for tensor in layer.tensors()
    }
    assert state_bytes(lm, 3) == sum(exact.values()) // 3
    assert state_bytes(lm, 1) == lm.init_state(1).nbytes


@pytest.mark.gpu
def test_state_bytes_on_a_gpu_are_what_its_allocator_counts():
    lm = random_model(BASE, device="cuda").with_state("int8")
    state = lm.init_state(64)
    tensors = sum(1 for layer in state.layers for _ in layer.tensors())
    asked = state.nbytes
    del state
    # Each tensor begins on a multiple of 512 bytes.
    assert asked <= 64 * state_bytes(lm, 64) <= asked + 512 * tensors + 64


def test_the_cost_of_a_format_is_measured():
    found = measure_cost(make(dataclasses.replace(BASE)), batch=2)
    assert found.batch == 2
    assert found.milliseconds > 0
    assert found.sequences is None or found.sequences > 100


def test_the_built_in_text_is_long_enough_to_measure_on():
    assert 1000 < len(built_in_text().split()) < 2000
