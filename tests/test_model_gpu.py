"""Under CUDA graphs every configuration gives the CPU's numbers: a prompt, its steps, the tokens chosen.

On a CPU a graph is stood in for by the work itself, so that what surrounds it is tested there too.
"""

import gc
import weakref
from itertools import islice
from types import SimpleNamespace

import pytest
import torch

from mamba1_testing import MAMBA1_VARIANTS
from mamba_cli import step_graph
from mamba_cli.decoding import decode
from mamba_cli.load import random_model
from mamba_cli.sampling import SamplingParams, UniformNumbers
from mamba_cli.state import AttentionState
from mamba_cli.step_graph import StepGraph
from mamba_cli.weights import random_tensors
from mamba_kernels.backend import use_backend
from model_testing import VARIANTS, make
from oracle import oracle_logits
from test_model import assert_states_agree, distance, ids_for

CONFIGS = VARIANTS | {f"mamba1_{name}": config for name, config in MAMBA1_VARIANTS.items()}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())

PROMPT, LENGTH = 5, 17


@pytest.fixture
def graphs(device, monkeypatch):
    """Captured steps have room for few tokens in a KV cache, so that they are captured again on the way."""
    monkeypatch.setattr(step_graph, "CAPTURED_POSITIONS", 4)
    if device.type == "cuda":
        return

    def stand_in(run, device):
        run()
        run()
        return SimpleNamespace(replay=run)

    def count_in_caches(state):
        for layer in state.layers:
            if isinstance(layer, AttentionState):
                layer.length += 1

    monkeypatch.setattr(step_graph, "capture", stand_in)
    monkeypatch.setattr(step_graph, "count_token", count_in_caches)  # the work itself counts in seqlen


def step_by_graph(lm, token_ids, state):
    """lm.step_ as it is on a GPU, on any device."""
    if lm.device.type == "cuda":
        return lm.step_(token_ids, state)
    with use_backend(lm.backend), torch.inference_mode():
        if state.graph is None:
            state.graph = StepGraph(lm.model, state)
        return state.graph(token_ids).clone()


@every_config
def test_steps_in_a_graph_are_the_prefill_of_the_cpu(config, device, graphs):
    ids, cpu = ids_for(config, length=LENGTH), make(config)
    expected = cpu(ids)
    lm = random_model(config, device=device.type)
    last, state = lm.prefill(ids[:, :PROMPT])
    assert distance(last.cpu(), expected[:, PROMPT - 1]) < 1e-4
    for t in range(PROMPT, LENGTH):
        assert distance(step_by_graph(lm, ids[:, t], state).cpu(), expected[:, t]) < 1e-4
    assert_states_agree(on_cpu(state), cpu.prefill(ids)[1], 1e-4)


def test_a_graph_keeps_the_buffers_that_it_works_in(device, monkeypatch):
    class Step:
        def __call__(self, token_ids, state):
            return torch.zeros(1)

    made = [Step()]
    alive = weakref.ref(made[0])
    monkeypatch.setattr(step_graph, "step_function", lambda model, state: made.pop())
    monkeypatch.setattr(step_graph, "capture", lambda run, device: run())
    lm = random_model(VARIANTS["plain"], device="cpu")
    graph = StepGraph(lm.model, lm.init_state(1))
    gc.collect()
    assert graph.logits is not None and alive() is not None


def test_a_graph_serves_a_text_longer_than_its_cache(device, graphs, monkeypatch):
    captures = []
    inner = step_graph.capture
    monkeypatch.setattr(step_graph, "capture", lambda *args: captures.append(1) or inner(*args))
    config = VARIANTS["hybrid"]
    ids, expected = ids_for(config, length=LENGTH), make(config)(ids_for(config, length=LENGTH))
    lm = random_model(config, device=device.type)
    state = lm.init_state(2)
    for t in range(LENGTH):
        assert distance(step_by_graph(lm, ids[:, t], state).cpu(), expected[:, t]) < 1e-4
    assert len(captures) == 4  # with room for 4 tokens, 8, 16 and 32


@every_config
def test_steps_in_bfloat16_are_near_the_recurrence(config, device, graphs):
    ids = ids_for(config, length=LENGTH)
    expected = oracle_logits(config, random_tensors(config), ids)
    lm = random_model(config, device=device.type, dtype="bfloat16")
    state = lm.init_state(2)
    steps = torch.stack([step_by_graph(lm, ids[:, t], state) for t in range(LENGTH)], 1)
    assert distance(steps.cpu(), expected) < 2e-2


@pytest.mark.gpu
@every_config
def test_prompts_of_one_length_are_those_of_the_cpu(config):
    """The first launches its kernels, the second captures them, the third replays."""
    lm, cpu = random_model(config, device="cuda"), make(config)
    for prompt in ids_for(config, batch=3, length=37)[:, None]:
        logits, state = lm.prefill(prompt)
        expected, end = cpu.prefill(prompt)
        assert distance(logits.cpu(), expected) < 1e-4
        assert_states_agree(on_cpu(state), end, 1e-4)


@pytest.mark.gpu
@every_config
def test_tokens_are_those_of_the_cpu(config):
    params, prompt = SamplingParams(temperature=0, repetition_penalty=1.3), ids_for(config, 1, 7)

    def tokens(lm):
        logits, state = lm.prefill(prompt)
        numbers = UniformNumbers(0, 1)
        steps = decode(lm, logits, state, params, config.vocab_size, prompt[0].tolist(), numbers)
        return list(islice(steps, 24))

    assert tokens(random_model(config, device="cuda")) == tokens(make(config))


def on_cpu(state):
    """A copy of `state` in the memory that tests compare in."""
    return SimpleNamespace(seqlen=state.seqlen, layers=[_layer_on_cpu(layer) for layer in state.layers])


def _layer_on_cpu(layer):
    if isinstance(layer, AttentionState):
        return SimpleNamespace(kv=layer.kv.cpu(), length=layer.length)
    return SimpleNamespace(ssm=layer.ssm.cpu(), conv=layer.conv.cpu())
