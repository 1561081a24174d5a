"""The fused decode step of Mamba-1 is the general step, for every configuration it says it serves."""

from dataclasses import replace

import pytest
import torch

from mamba1_testing import MAMBA1, MAMBA1_VARIANTS
from mamba_cli.fused_step import FusedStep
from mamba_cli.fused_step_mamba1 import FusedStepMamba1
from mamba_cli.load import random_model
from mamba_cli.step_graph import StepGraph, step_function
from mamba_cli.weights import random_tensors
from mamba_kernels.backend import use_backend
from mamba_kernels.decode_layer import MANY_ROWS
from model_testing import VARIANTS
from oracle import oracle_logits
from test_model import assert_states_agree, distance, ids_for

SERVED = {name: config for name, config in MAMBA1_VARIANTS.items() if FusedStepMamba1.serves(config)}
# Triton's interpreter takes seconds for each: test_decode_mamba1.py has the kernels' own cases.
CASES = [
    *[(name, "torch", batch) for name in SERVED for batch in (2, MANY_ROWS)],
    ("plain", "triton", 1),
    ("falcon_with_biases", "triton", 3),
    ("odd_widths", "triton", 2),
    ("falcon", "triton", MANY_ROWS),
]


def test_what_is_served():
    assert MAMBA1_VARIANTS.keys() - SERVED.keys() == {"layer_norm", "mlp"}
    for name, config in (MAMBA1_VARIANTS | VARIANTS).items():
        assert not (FusedStep.serves(config) and FusedStepMamba1.serves(config)), name


def test_a_graph_captures_the_fused_step():
    lm = random_model(MAMBA1, device="cpu")
    assert isinstance(step_function(lm.model, lm.init_state(2)), FusedStepMamba1)


@pytest.mark.parametrize(("name", "backend", "batch"), CASES)
def test_fused_step_is_the_general_step(name, backend, batch, device, nan_filled_empty):
    config = SERVED[name]
    lm, ids = random_model(config, device=device.type), ids_for(config, batch)
    _, state = lm.prefill(ids[:, :5])
    fused_state = state.clone()
    fused = FusedStepMamba1(lm.model, batch)
    for t in range(5, 8):
        logits, state = lm.step(ids[:, t], state)
        with use_backend(backend), torch.inference_mode():
            fused_logits = fused(ids[:, t].to(device), fused_state)
        assert distance(fused_logits, logits) < 1e-5
    assert_states_agree(fused_state, state, 1e-5)


@pytest.mark.parametrize(
    ("backend", "batch", "ssm_dtype"),
    [
        ("torch", 2, torch.float16),
        ("torch", MANY_ROWS, torch.float32),
        ("triton", 2, torch.float32),
        ("triton", MANY_ROWS, torch.float16),
    ],
)
def test_a_float16_model_is_near_the_recurrence(backend, batch, ssm_dtype, device, nan_filled_empty):
    config = MAMBA1_VARIANTS["falcon"]
    ids = ids_for(config, batch, length=4)
    expected = oracle_logits(config, random_tensors(config), ids)
    lm = random_model(config, device=device.type, dtype="float16")
    lm.ssm_dtype = ssm_dtype
    state, fused = lm.init_state(batch), FusedStepMamba1(lm.model, batch)
    for t in range(4):
        with use_backend(backend), torch.inference_mode():
            logits = fused(ids[:, t].to(device), state)
        assert distance(logits, expected[:, t].to(device)) < 5e-3


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 4, 64])
def test_early_starts_change_no_bit(batch, monkeypatch):
    """In a graph, as decoding runs them, and launched one after the other without any."""
    config = replace(MAMBA1, d_model=256, d_inner=512, d_ssm=512, dt_rank=16, n_layer=6)
    lm, ids = random_model(config, device="cuda", dtype="bfloat16"), ids_for(config, batch).cuda()
    state = lm.init_state(batch)
    graph = StepGraph(lm.model, state)
    with torch.inference_mode():
        replayed = [graph(ids[:, t]).clone() for t in range(8)]
    for module in ("decode_linear_triton", "decode_mamba1_triton"):
        monkeypatch.setattr(f"mamba_kernels.{module}.early_start", lambda pdl, tensor: {"PDL": False})
    state, fused = lm.init_state(batch), FusedStepMamba1(lm.model, batch)
    with torch.inference_mode():
        for t in range(8):
            assert torch.equal(fused(ids[:, t], state), replayed[t])
