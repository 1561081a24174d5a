"""Under CUDA graphs a packed state is the same to the bit: prompts, steps, tokens chosen, two models in turn.

On a CPU tapes stand in for the graphs, so that what no graph could capture, or would miss when it replays, is
found there too; see graph_testing.
"""

import gc
from dataclasses import replace
from itertools import islice

import pytest
import torch

from graph_testing import use_tapes
from mamba1_testing import FALCON
from mamba_cli.decoding import Chooser, decode
from mamba_cli.fused_step import FusedStep
from mamba_cli.fused_step_mamba1 import FusedStepMamba1
from mamba_cli.language_model import LanguageModel
from mamba_cli.load import random_model
from mamba_cli.sampling import SamplingParams, UniformNumbers
from mamba_cli.state import SSMState
from mamba_cli.state_format import StateFormat
from mamba_cli.step_graph import PrefillGraphs, StepGraph, step_function
from mamba_kernels.backend import use_backend
from mamba_kernels.packed_state import LayerFormat
from model_testing import hybrid, make, variant
from test_model import distance

VOCAB = 13  # of all the ids that are read
ALIKE = ("int8", "int4", "fp8")
MIXED = ("int4", "int8", "fp16", "int8")
# Of published shapes on a GPU, and small ones for Triton's interpreter, where a window of 2 is soon full.
LAYERS = {
    "mamba2": {"cuda": [(dtype,) * 4 for dtype in ALIKE] + [MIXED], "cpu": [MIXED]},
    "mamba1": {"cuda": [(dtype,) for dtype in ALIKE], "cpu": [("int8",)]},
}
SMALL = dict(d_model=16, d_inner=32, d_ssm=32, headdim=8, d_state=8, vocab_size=VOCAB, vocab_rows=16)
SHAPES = {
    "mamba2": {"cuda": dict(d_model=64, d_inner=256, d_ssm=256, headdim=64, d_state=128), "cpu": SMALL},
    "mamba1": {"cuda": dict(d_model=64, d_inner=128, d_ssm=128), "cpu": SMALL | dict(d_inner=8, d_ssm=8)},
}
MAMBA1 = dict(layer="Mamba1", headdim=1, dt_rank=4, rmsnorm=False)
WINDOW = {"cuda": 4, "cpu": 2}
LENGTHS = {"cuda": (5, 13, 40), "cpu": (5,)}
kinds = pytest.mark.parametrize("kind", LAYERS)


@pytest.fixture(autouse=True)
def graphs(device, monkeypatch):
    if device.type == "cpu":
        use_tapes(monkeypatch)
        # A program for a whole projection: Triton's interpreter takes its time for each.
        projection = dict(BLOCK_M=4, BLOCK_N=128, BLOCK_K=16, PREFETCH=1, num_warps=1)
        for name in ("decode_matvec_triton.config_for", "decode_mamba1_triton.x_proj_config_for"):
            monkeypatch.setattr(f"mamba_kernels.{name}", lambda *args: projection)


def model_of(kind: str, device: torch.device, seed: int = 0) -> LanguageModel:
    """A random model whose layers have a format each, its prompts read through graphs on any device.

    Any seed but 0 has calibrated scales too: of convolution windows in int8, and of the last layer's columns.
    """
    on, layers = device.type, LAYERS[kind][device.type]
    config = variant(n_layer=len(layers), **SHAPES[kind][on] | (MAMBA1 if kind == "mamba1" else {}))
    formats = tuple(
        LayerFormat(heads, window=WINDOW[on], seed=7 * seed + i) for i, heads in enumerate(layers)
    )
    state, calibrated = StateFormat(formats, name="of each layer"), {}
    if seed:
        state = replace(state, conv="int8")
        scales = torch.linspace(0.5, 2, len(layers[-1]) * config.d_state).view(len(layers[-1]), -1)
        calibrated["columns"] = [None] * (len(layers) - 1) + [scales]
        calibrated["conv_peaks"] = [torch.full((config.conv_dim,), 4.0)] * len(layers)
    dtype = "bfloat16" if on == "cuda" else "float32"
    lm = random_model(config, device=on, dtype=dtype, backend="triton", seed=seed)
    return through_graphs(lm.with_state(state, **calibrated))


def through_graphs(lm: LanguageModel) -> LanguageModel:
    if lm.device.type == "cpu":
        lm._prefill = PrefillGraphs(lm.model)
    assert lm.captures or lm.device.type == "cpu"
    return lm


class Graphs:
    """The model through graphs."""

    def __init__(self, lm):
        self.lm = lm

    def prefill(self, ids, state=None):
        return self.lm.prefill(ids, state)

    def step(self, token_ids, state):
        if self.lm.device.type == "cuda":
            return self.lm.step_(token_ids, state)
        if state.graph is None:
            with use_backend(self.lm.backend):
                state.graph = StepGraph(self.lm.model, state)
        return state.graph(token_ids).clone()


class NoGraphs:
    """The same kernels, each launched from Python."""

    def __init__(self, lm):
        self.lm = lm
        self.steps = {}

    def prefill(self, ids, state=None):
        state = self.lm.init_state(len(ids)) if state is None else state.clone()
        with use_backend(self.lm.backend):
            hidden = self.lm.model.prefill(ids.to(self.lm.device), state)
        return self.lm.logits(hidden[:, -1]), state

    def step(self, token_ids, state):
        step = self.steps.setdefault(state.batch, step_function(self.lm.model, state))
        with use_backend(self.lm.backend):
            return step(token_ids, state).clone()


def read(way, batch):
    """Read prompts of each length, the second of them captured and the third replayed, then steps past two
    windows; a prompt behind them, on a window that is partly full, and steps again.

    Yields what was read, the logits, and the state, which the next turn may change.
    """
    generator = torch.Generator().manual_seed(batch)

    def ids(*shape):
        return torch.randint(VOCAB, shape, generator=generator)

    window, lengths = (of[way.lm.device.type] for of in (WINDOW, LENGTHS))
    for length in lengths:
        for turn in ("launched", "captured", "replayed"):
            logits, state = way.prefill(ids(batch, length))
            yield f"prompt of {length}, {turn}", logits, state
    for step in range(2 * window + 2):
        yield f"step {step}", way.step(ids(batch).to(way.lm.device), state), state
    logits, state = way.prefill(ids(batch, lengths[0]), state)
    yield f"prompt of {lengths[0]} after the steps", logits, state
    for step in range(window):
        yield f"step {step} after that", way.step(ids(batch).to(way.lm.device), state), state


def litter(device):
    """Fill memory that was freed with what is no number."""
    gc.collect()
    if device.type == "cuda":  # a tape sees by itself that memory is gone
        sizes = [2**power for power in range(4, 22, 2)] * 8
        held = [torch.full((size,), float("nan"), device=device) for size in sizes]
        del held


def differences(state, expected) -> list[str]:
    """What differs between two states, layer by layer."""
    found = []
    for index, (layer, other) in enumerate(zip(state.layers, expected.layers, strict=True)):
        assert isinstance(layer, SSMState)
        names = ["conv", "codes", "scales", "x", "B", "dt", "position"]
        for name, one, two in zip(names, layer.tensors(), other.tensors(), strict=True):
            if not torch.equal(one, two):
                wrong = (one != two).sum().item()
                far = (one.double() - two.double()).abs().max().item()
                found.append(f"layer {index} {name}: {wrong} of {one.numel()} differ, by up to {far:.3g}")
    if state.seqlen != expected.seqlen:
        found.append(f"seqlen: {state.seqlen}, not {expected.seqlen}")
    return found


@kinds
@pytest.mark.parametrize("batch", [1, 3])
@torch.inference_mode()
def test_graphs_of_two_models_in_turn_change_no_bit(kind, batch, device):
    if device.type == "cpu" and batch > 1:
        pytest.skip("takes Triton's interpreter too long")
    models = [model_of(kind, device, seed) for seed in (0, 1)]
    expected = [
        [(what, logits, state.clone()) for what, logits, state in read(NoGraphs(lm), batch)] for lm in models
    ]
    ways = [read(Graphs(lm), batch) for lm in models]
    problems = []
    for turn in range(len(expected[0])):
        litter(device)
        for index, way in enumerate(ways):
            what, logits, state = next(way)
            _, wanted, wanted_state = expected[index][turn]
            wrong = differences(state, wanted_state)
            if not torch.equal(logits, wanted):
                nan = logits.isnan().sum().item()
                wrong.insert(0, f"logits {distance(logits, wanted):.3g} off, {nan} of {logits.numel()} NaN")
            problems += [f"model {index}, {what} (turn {turn}): {problem}" for problem in wrong]
    assert not problems, f"{len(problems)} differences, the first ones:\n" + "\n".join(problems[:30])


@kinds
@torch.inference_mode()
def test_steps_by_graph_are_near_the_plain_model(kind, device):
    lm = model_of(kind, device)
    assert isinstance(step_function(lm.model, lm.init_state(2)), (FusedStep, FusedStepMamba1))
    ids = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(3))
    expected = make(lm.config)(ids)
    way = Graphs(lm)
    logits, state = way.prefill(ids[:, :4])
    found = [distance(logits.cpu(), expected[:, 3])]
    for t in range(4, 9):
        found.append(distance(way.step(ids[:, t].to(device), state).cpu(), expected[:, t]))
    assert max(found) < 0.2, f"after each of the tokens from 3 on: {found}"


@pytest.mark.parametrize(
    "config",
    [hybrid(), variant(rms_norm=False, n_layer=1), replace(FALCON, n_layer=1, d_inner=16, d_ssm=16)],
    ids=["hybrid", "layer_norm", "falcon"],
)
@torch.inference_mode()
def test_steps_by_graph_are_the_general_step(config, device):
    """A fused step rounds otherwise: of one layer, where that is not carried on."""
    lm = through_graphs(
        random_model(config, device=device.type, backend="triton").with_state("int8:2:uniform")
    )
    ids = torch.randint(VOCAB, (1, 9), generator=torch.Generator().manual_seed(4))
    state, by_graph = (way.prefill(ids[:, :4])[1] for way in (NoGraphs(lm), Graphs(lm)))
    way, found = Graphs(lm), []
    for t in range(4, 9):
        logits, state = lm.step(ids[:, t], state)
        found.append(distance(way.step(ids[:, t].to(device), by_graph), logits))
    assert max(found) < 1e-4, f"after each of the tokens from 4 on: {found}"


@pytest.mark.gpu
@kinds
@torch.inference_mode()
def test_tokens_chosen_in_a_graph_are_those_chosen_outside(kind, device):
    """Of two prompts by the same decoder, and another model's decoder between."""
    models = [model_of(kind, device, seed) for seed in (0, 1)]
    greedy = SamplingParams(temperature=0)
    for turn in range(2):
        for index, lm in enumerate(models):
            ids = torch.randint(VOCAB, (1, 11), generator=torch.Generator().manual_seed(turn))
            logits, state = lm.prefill(ids)
            way, expected = NoGraphs(lm), []
            last, own = logits, state.clone()
            chooser = Chooser(greedy, VOCAB, lm.config.vocab_rows, 1, device)
            for _ in range(3 * WINDOW["cuda"]):
                token_ids = chooser.choose(last)
                expected.append(token_ids.tolist())
                last = way.step(token_ids, own)
            litter(device)
            tokens = decode(lm, logits, state, greedy, VOCAB, ids[0].tolist(), UniformNumbers(0, 1))
            found = list(islice(tokens, len(expected)))
            assert found == expected, f"turn {turn}, model {index}"


@pytest.mark.gpu
@kinds
def test_torch_on_a_gpu_launches_a_packed_state(kind, device):
    """Its form of a packed state waits for the device, so nothing is captured."""
    config = model_of(kind, device).config
    lm = random_model(config, device="cuda", backend="torch").with_state("int8:2")
    assert not lm.captures and lm.with_state("fp32").captures
    ids = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(5))
    for _ in range(3):
        _, state = lm.prefill(ids[:, :4])
    logits = torch.stack([lm.step_(ids[:, t], state) for t in range(4, 9)], 1)
    assert distance(logits.cpu(), make(config)(ids)[:, 4:]) < 2e-2
