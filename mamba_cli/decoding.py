"""From logits to tokens, one after the other: the loop that `generate` and `bench` read from."""

from collections import deque
from collections.abc import Iterator, Sequence

import torch

from mamba_cli.language_model import LanguageModel
from mamba_cli.sampling import SamplingParams, UniformNumbers
from mamba_cli.state import State
from mamba_cli.step_graph import capture, count_token, is_full, make_static, step_function
from mamba_kernels.backend import use_backend
from mamba_kernels.choose_token import choose_token

# Random numbers are drawn for this many steps at a time, to be sent to the device at once.
STEPS_DRAWN = 256
# Steps that a GPU is given ahead of the token that is read back: it then never waits for the host. They
# divide STEPS_DRAWN, so that a step's place in the history is the same by its turn.
STEPS_AHEAD = 4


class Chooser:
    """Chooses the next tokens of a batch; all of it stays on the device, so it can be captured.

    token_ids: int64 (batch,), the last choice. turn: int64 (batch,), choices made since random numbers were
    drawn, or since the start. history: int64 (STEPS_AHEAD, batch), the last choices, by turn % STEPS_AHEAD.
    seen: bool (batch, vocab_rows), for a penalty.
    """

    def __init__(
        self, params: SamplingParams, vocab_size: int, vocab_rows: int, batch: int, device: torch.device
    ):
        self.params = params
        self.vocab_size = vocab_size
        self.token_ids = torch.zeros(batch, dtype=torch.long, device=device)
        self.turn = torch.zeros_like(self.token_ids)
        self.history = torch.zeros(STEPS_AHEAD, batch, dtype=torch.long, device=device)
        self.seen = self.uniform = None
        if params.repetition_penalty != 1:
            self.seen = torch.zeros(batch, vocab_rows, dtype=torch.bool, device=device)
        if not params.greedy:
            self.uniform = torch.zeros(STEPS_DRAWN, batch, dtype=torch.float64, device=device)

    def start(self, prompt_ids: Sequence[int]) -> None:
        """Forget all choices; the tokens of the prompt count as seen."""
        self.turn.zero_()
        if self.seen is not None:
            self.seen.zero_()
            self.seen[:, [token_id for token_id in set(prompt_ids) if token_id < self.vocab_size]] = True

    def draw(self, numbers: UniformNumbers) -> None:
        """Take the random numbers of the next STEPS_DRAWN choices."""
        if self.uniform is not None:
            self.uniform.copy_(numbers.draw(STEPS_DRAWN))
            self.turn.zero_()

    def choose(self, logits: torch.Tensor, pdl: bool = False) -> torch.Tensor:
        """Choose from logits (batch, vocab_rows); return token_ids. pdl: as choose_token's."""
        choose_token(
            logits, self.token_ids, vocab_size=self.vocab_size, turn=self.turn, uniform=self.uniform,
            seen=self.seen, history=self.history, pdl=pdl, **self.params.arguments,
        )  # fmt: skip
        return self.token_ids

    def tensors(self) -> list[torch.Tensor]:
        """What a choice changes."""
        changed = [self.token_ids, self.turn, self.history]
        return changed if self.seen is None else [*changed, self.seen]


@torch.inference_mode()
def decode(
    lm: LanguageModel,
    logits: torch.Tensor,
    state: State,
    params: SamplingParams,
    vocab_size: int,
    prompt_ids: Sequence[int],
    numbers: UniformNumbers,
) -> Iterator[list[int]]:
    """Yield the chosen token of each row, step after step without end.

    logits: (batch, vocab_rows), those after the prompt; `state` may be updated in place.
    """
    if lm.captures:
        decoder = captured_decoder(lm, state, params, vocab_size)
        yield from decoder.tokens(logits, state, prompt_ids, numbers)
        return
    chooser = Chooser(params, vocab_size, logits.shape[1], logits.shape[0], lm.device)
    chooser.start(prompt_ids)
    while True:
        chooser.draw(numbers)
        for _ in range(STEPS_DRAWN):
            token_ids = chooser.choose(logits)
            yield token_ids.tolist()
            logits = lm.step_(token_ids, state)


def captured_decoder(
    lm: LanguageModel, state: State, params: SamplingParams, vocab_size: int
) -> "CapturedDecoder":
    """Return the decoder of the last call where it fits this one, as it does from prompt to prompt."""
    key = (state.batch, params, vocab_size)
    if lm.decoder is None or lm.decoder[0] != key or not lm.decoder[1].has_room(state):
        lm.decoder = None  # its memory goes before the next one's comes
        lm.decoder = (key, CapturedDecoder(lm, state, params, vocab_size))
    return lm.decoder[1]


class CapturedDecoder:
    """A step and the choice of the next token in one CUDA graph: a token costs one replay."""

    def __init__(self, lm: LanguageModel, state: State, params: SamplingParams, vocab_size: int):
        self.lm = lm
        self.state = state.clone()
        self.chooser = Chooser(params, vocab_size, lm.config.vocab_rows, state.batch, lm.device)
        self.reader = torch.cuda.Stream(lm.device)
        self._capture()

    def has_room(self, state: State) -> bool:
        """Whether the KV caches, if there are any, hold what `state` has."""
        caches = zip(self.state.layers, state.layers, strict=True)
        return all(mine.capacity > theirs.length for mine, theirs in caches if hasattr(mine, "kv"))

    def tokens(
        self, logits: torch.Tensor, state: State, prompt_ids: Sequence[int], numbers: UniformNumbers
    ) -> Iterator[list[int]]:
        """Yield as `decode` does; the graph runs STEPS_AHEAD steps ahead of the reader."""
        self.state.copy_(state)
        self.chooser.start(prompt_ids)
        self.chooser.draw(numbers)
        with use_backend(self.lm.backend):
            self.chooser.choose(logits)
        read = torch.empty(STEPS_AHEAD, state.batch, dtype=torch.long, pin_memory=True)
        on_the_way: deque[tuple[int, torch.cuda.Event]] = deque()
        step = 0
        while True:
            while len(on_the_way) < STEPS_AHEAD:
                if step:
                    self._advance(step, numbers)
                slot = step % STEPS_AHEAD
                on_the_way.append((slot, self._read(slot, read)))
                step += 1
            slot, arrival = on_the_way.popleft()
            arrival.synchronize()
            yield read[slot].tolist()

    def _read(self, slot: int, read: torch.Tensor) -> torch.cuda.Event:
        """Copy a choice to `read`, on a stream of its own: the next step need not wait for the copy."""
        self.reader.wait_stream(torch.cuda.current_stream(self.lm.device))
        with torch.cuda.stream(self.reader):
            read[slot].copy_(self.chooser.history[slot], non_blocking=True)
            return self.reader.record_event()

    def _advance(self, step: int, numbers: UniformNumbers) -> None:
        if is_full(self.state):
            self._capture()
        if step % STEPS_DRAWN == 0:
            self.chooser.draw(numbers)
        self.graph.replay()
        count_token(self.state)

    def _capture(self) -> None:
        torch.cuda.current_stream(self.lm.device).wait_stream(self.reader)  # it may be reading the history
        make_static(self.state)
        saved = self.state.clone()
        kept = [tensor.clone() for tensor in self.chooser.tensors()]
        self.chooser.turn.zero_()  # what is captured also runs, and random numbers may be about to end
        # Kept, as its buffers are what the graph works in.
        self._step = step_function(self.lm.model, self.state)
        pdl = getattr(self._step, "pdl", False)  # of a fused step, whose last kernel lets the next one start

        def run() -> None:
            self.chooser.choose(self._step(self.chooser.token_ids, self.state), pdl)

        with use_backend(self.lm.backend):
            self.graph = capture(run, self.lm.device)
        self.state.copy_(saved)
        for tensor, value in zip(self.chooser.tensors(), kept, strict=True):
            tensor.copy_(value)
