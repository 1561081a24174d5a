"""The fused decode step is the general step, for every configuration it says it serves."""

import pytest
import torch

from mamba_cli import fused_step
from mamba_cli.fused_step import FusedStep
from mamba_cli.load import random_model
from mamba_kernels.backend import use_backend
from mamba_kernels.decode_layer import MANY_ROWS
from model_testing import VARIANTS
from test_model import assert_states_agree, distance, ids_for

SERVED = {name: config for name, config in VARIANTS.items() if FusedStep.serves(config)}
# Triton's interpreter takes seconds for each: the tests of the decode step have the kernels' own cases.
CASES = [(name, "torch") for name in SERVED] + [("plain", "triton"), ("norm_before_gate", "triton")]
MANY_ROWS_CASES = [(name, "torch") for name in SERVED] + [("groups_as_heads", "triton")]


def test_what_is_served():
    assert {"plain", "groups_as_heads", "dt_limited", "projection_bias", "no_gated_norm"} <= SERVED.keys()
    assert not {"mlp", "hybrid", "part_of_the_width_is_ssm", "layer_norm"} & SERVED.keys()


@pytest.mark.parametrize(
    ("name", "backend", "batch"),
    [(*case, 2) for case in CASES] + [(*case, MANY_ROWS) for case in MANY_ROWS_CASES],
)
def test_fused_step_is_the_general_step(name, backend, batch, device, nan_filled_empty):
    check_fused_step(name, backend, batch, device)


@pytest.mark.parametrize(("name", "backend"), MANY_ROWS_CASES)
def test_so_it_is_with_our_products_of_many_rows(name, backend, device, nan_filled_empty, monkeypatch):
    monkeypatch.setattr(fused_step, "library_rows", lambda d_model, dtype: MANY_ROWS + 1)
    check_fused_step(name, backend, MANY_ROWS, device)


def check_fused_step(name, backend, batch, device):
    config = SERVED[name]
    lm, ids = random_model(config, device=device.type), ids_for(config, batch)
    _, state = lm.prefill(ids[:, :5])
    fused_state = state.clone()
    fused = FusedStep(lm.model, batch)
    for t in range(5, 8):
        logits, state = lm.step(ids[:, t], state)
        with use_backend(backend), torch.inference_mode():
            fused_logits = fused(ids[:, t].to(device), fused_state)
        assert distance(fused_logits, logits) < 1e-5
    assert_states_agree(fused_state, state, 1e-5)
