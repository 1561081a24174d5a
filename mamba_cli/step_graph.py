"""Work of a model captured in CUDA graphs: a decode step, or a block of a prompt, costs one replay."""

import gc
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from mamba_cli.fused_step import FusedStep
from mamba_cli.fused_step_mamba1 import FusedStepMamba1
from mamba_cli.model import Model
from mamba_cli.state import AttentionState, State

# A captured step attends to the whole of a cache: room for this many more tokens costs little, and a
# graph of twice the room is captured when they are used up.
CAPTURED_POSITIONS = 1024

Step = Callable[[torch.Tensor, State], torch.Tensor]


def step_function(model: Model, state: State) -> Step:
    """Return the fastest step for `model` on a GPU: (token_ids (batch,), state) -> logits, state in place.

    The step serves all states that are kept as `state` is.
    """
    if FusedStep.serves(model.config):
        return FusedStep(model, state.batch)
    if FusedStepMamba1.serves(model.config):
        return FusedStepMamba1(model, state.batch, packed=bool(state.packed))
    return lambda token_ids, state: model.head(model.step(token_ids, state))


def capture(run: Callable[[], None], device: torch.device) -> torch.cuda.CUDAGraph:
    """Return a graph of the device work of `run`, which must not wait for the device.

    `run` is called twice before and once while capturing: the calls before compile its kernels. Whoever
    captures work that changes a state restores it.
    """
    with torch.cuda.device(device), _no_garbage_collection():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
    return graph


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Hold back the collector: an old graph that it found while another is captured would break that one."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class StepGraph:
    """Advances the state it was made for: `logits = graph(token_ids)`."""

    def __init__(self, model: Model, state: State):
        self.model = model
        self.state = state
        self.token_ids = torch.zeros(state.batch, dtype=torch.long, device=model.embedding.device)
        self._capture()

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Read token_ids (batch,); return logits (batch, vocab_rows) that the next call overwrites."""
        if is_full(self.state):
            self._capture()
        self.token_ids.copy_(token_ids)
        self.graph.replay()
        count_token(self.state)
        return self.logits

    def _capture(self) -> None:
        make_static(self.state)
        saved = self.state.clone()
        # Kept, as its buffers are what the graph works in.
        self._step = step_function(self.model, self.state)

        def run() -> None:
            self.logits = self._step(self.token_ids, self.state)

        self.graph = capture(run, self.token_ids.device)
        self.state.copy_(saved)


class PrefillGraphs:
    """Reads blocks of a prompt; the second block of one shape captures a graph, which all later ones replay.

    Launching the kernels of a layer takes the host longer than running them on a few hundred tokens
    takes the device. A shape that comes once is not worth the capture.
    """

    # Graphs kept, the least recently used goes first: each holds the activations of its block.
    KEPT = 4

    def __init__(self, model: Model):
        self.model = model
        self._graphs: OrderedDict[tuple[int, int], _PrefillGraph | None] = OrderedDict()

    def __call__(self, input_ids: torch.Tensor, state: State) -> torch.Tensor:
        """As Model.prefill: hidden (batch, seqlen, d_model) of input_ids (batch, seqlen), state in place."""
        if self.model.config.attn_layer_idx:  # its shapes grow with the text
            return self.model.prefill(input_ids, state)
        shape = tuple(input_ids.shape)
        if shape not in self._graphs:
            self._graphs[shape] = None
            if len(self._graphs) > self.KEPT:
                self._graphs.popitem(last=False)
            return self.model.prefill(input_ids, state)
        self._graphs.move_to_end(shape)
        graph = self._graphs[shape]
        if graph is None:
            graph = self._graphs[shape] = _PrefillGraph(self.model, input_ids, state)
        return graph(input_ids, state)


class _PrefillGraph:
    """One shape of block, on a state of its own."""

    def __init__(self, model: Model, input_ids: torch.Tensor, state: State):
        self.input_ids = input_ids.clone()
        self.state = state.clone()

        def run() -> None:
            self.hidden = model.prefill(self.input_ids, self.state)

        self.graph = capture(run, input_ids.device)

    def __call__(self, input_ids: torch.Tensor, state: State) -> torch.Tensor:
        self.input_ids.copy_(input_ids)
        self.state.copy_(state)
        self.graph.replay()
        self.state.seqlen += input_ids.shape[1]
        state.copy_(self.state)
        return self.hidden.clone()


def make_static(state: State) -> None:
    """Give every KV cache room for steps that are captured, and its position a place on the device."""
    for layer in _caches(state):
        layer.reserve(layer.length + max(layer.length, CAPTURED_POSITIONS))
        layer.position = torch.tensor(layer.length, device=layer.kv.device)


def is_full(state: State) -> bool:
    """Whether a KV cache has no room for another captured step."""
    return any(layer.length == layer.capacity for layer in _caches(state))


def count_token(state: State) -> None:
    """Keep the Python side of `state` in step with a replay."""
    state.seqlen += 1
    for layer in _caches(state):
        layer.length += 1


def _caches(state: State) -> list[AttentionState]:
    return [layer for layer in state.layers if isinstance(layer, AttentionState)]
