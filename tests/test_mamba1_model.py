"""Every path of a Mamba-1 model gives the oracle's numbers: whole, split, token by token, in a batch."""

import pytest
import torch

from mamba1_testing import MAMBA1, MAMBA1_VARIANTS
from mamba_cli.weights import random_tensors
from model_testing import make
from oracle import oracle_logits
from test_model import assert_states_agree, distance, ids_for

every_variant = pytest.mark.parametrize("config", MAMBA1_VARIANTS.values(), ids=MAMBA1_VARIANTS.keys())


@every_variant
def test_whole_prefill_is_the_recurrence(config):
    ids = ids_for(config, length=70)  # over two segments of the scan
    expected = oracle_logits(config, random_tensors(config), ids)
    assert distance(make(config, "float64")(ids), expected) < 1e-12
    assert distance(make(config)(ids), expected) < 1e-5


@every_variant
def test_token_by_token_is_the_recurrence(config):
    lm, ids = make(config), ids_for(config)
    expected = oracle_logits(config, random_tensors(config), ids)
    state = lm.init_state(2)
    for t in range(ids.shape[1]):
        logits, state = lm.step(ids[:, t], state)
        assert distance(logits, expected[:, t]) < 1e-4
    assert_states_agree(state, lm.prefill(ids)[1], 1e-5)


@every_variant
@pytest.mark.parametrize("cut", [1, 3, 32, 36])
def test_prefill_in_two_parts_is_one_prefill(config, cut):
    lm, ids = make(config, "float64"), ids_for(config)
    whole, end = lm.prefill(ids)
    last, continued = lm.prefill(ids[:, cut:], lm.prefill(ids[:, :cut])[1])
    assert distance(last, whole) < 1e-12
    assert_states_agree(continued, end, 1e-12)


@every_variant
def test_bf16_is_near_the_recurrence(config):
    ids = ids_for(config)
    expected = oracle_logits(config, random_tensors(config), ids)
    lm = make(config, "bfloat16")
    assert distance(lm(ids), expected) < 2e-2
    state = lm.init_state(2)
    steps = torch.stack([lm.step_(ids[:, t], state) for t in range(ids.shape[1])], 1)
    assert distance(steps, expected) < 2e-2


@pytest.mark.parametrize("ssm_dtype", [torch.bfloat16, torch.float16])
def test_a_16_bit_state_is_near_the_recurrence(ssm_dtype):
    lm, ids = make(MAMBA1), ids_for(MAMBA1)
    expected = oracle_logits(MAMBA1, random_tensors(MAMBA1), ids)
    lm.ssm_dtype = ssm_dtype
    state = lm.init_state(2)
    assert state.layers[0].ssm.dtype == ssm_dtype
    steps = torch.stack([lm.step_(ids[:, t], state) for t in range(ids.shape[1])], 1)
    assert distance(steps, expected) < 2e-2


def test_a_row_alone_is_the_row_in_a_batch():
    lm, ids = make(MAMBA1, "float64"), ids_for(MAMBA1, batch=3)
    together, state = lm.prefill(ids[:, :20])
    stepped, _ = lm.step(ids[:, 20], state)
    for row in range(3):
        alone, state_alone = lm.prefill(ids[row : row + 1, :20])
        assert distance(alone, together[row : row + 1]) < 1e-12
        assert distance(lm.step(ids[row : row + 1, 20], state_alone)[0], stepped[row : row + 1]) < 1e-12
