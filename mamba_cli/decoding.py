"""From logits to tokens, one after the other: the loop that `generate` and `bench` read from."""

from collections import deque
from collections.abc import Iterator, Sequence

import torch

from mamba_cli.language_model import LanguageModel
from mamba_cli.sampling import SamplingParams, UniformNumbers, sample
from mamba_cli.state import State
from mamba_cli.step_graph import capture, count_token, is_full, make_static, step_function
from mamba_kernels.backend import use_backend

# Random numbers are drawn for this many steps at a time, to be sent to the device at once.
STEPS_DRAWN = 256
# Steps that a GPU is given ahead of the token that is read back: it then never waits for the host.
STEPS_AHEAD = 4


class Chooser:
    """Chooses the next tokens of a batch; all of it stays on the device, so it can be captured.

    token_ids: int64 (batch,), the last choice. seen: bool (batch, vocab_size), for a penalty.
    """

    def __init__(self, params: SamplingParams, vocab_size: int, batch: int, device: torch.device):
        self.params = params
        self.vocab_size = vocab_size
        self.token_ids = torch.zeros(batch, dtype=torch.long, device=device)
        self.seen = None
        if params.repetition_penalty != 1:
            self.seen = torch.zeros(batch, vocab_size, dtype=torch.bool, device=device)
        self._uniform = torch.zeros(STEPS_DRAWN, batch, dtype=torch.float64, device=device)
        self._turn = torch.zeros(1, dtype=torch.long, device=device)

    def start(self, prompt_ids: Sequence[int]) -> None:
        """Forget all choices; the tokens of the prompt count as seen."""
        if self.seen is not None:
            self.seen.zero_()
            self.seen[:, [token_id for token_id in set(prompt_ids) if token_id < self.vocab_size]] = True

    def draw(self, numbers: UniformNumbers) -> None:
        """Take the random numbers of the next STEPS_DRAWN choices."""
        if not self.params.greedy:
            self._uniform.copy_(numbers.draw(STEPS_DRAWN))
            self._turn.zero_()

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        """Choose from logits (batch, vocab_rows); return token_ids."""
        uniform = None if self.params.greedy else self._uniform.index_select(0, self._turn)[0]
        self.token_ids.copy_(sample(logits, self.params, self.vocab_size, uniform, self.seen))
        if self.seen is not None:
            self.seen.scatter_(1, self.token_ids[:, None], True)
        self._turn.add_(1)
        return self.token_ids


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
    if lm.device.type == "cuda":
        decoder = captured_decoder(lm, state, params, vocab_size)
        yield from decoder.tokens(logits, state, prompt_ids, numbers)
        return
    chooser = Chooser(params, vocab_size, logits.shape[0], lm.device)
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
        self.chooser = Chooser(params, vocab_size, state.batch, lm.device)
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
        self.chooser.choose(logits)
        read = torch.empty(STEPS_AHEAD, state.batch, dtype=torch.long, pin_memory=True)
        on_the_way: deque[tuple[int, torch.cuda.Event]] = deque()
        step = 0
        while True:
            while len(on_the_way) < STEPS_AHEAD:
                if step:
                    self._advance(step, numbers)
                slot = step % STEPS_AHEAD
                read[slot].copy_(self.chooser.token_ids, non_blocking=True)
                arrival = torch.cuda.Event()
                arrival.record(torch.cuda.current_stream(self.lm.device))
                on_the_way.append((slot, arrival))
                step += 1
            slot, arrival = on_the_way.popleft()
            arrival.synchronize()
            yield read[slot].tolist()

    def _advance(self, step: int, numbers: UniformNumbers) -> None:
        if is_full(self.state):
            self._capture()
        if step % STEPS_DRAWN == 0:
            self.chooser.draw(numbers)
        self.graph.replay()
        count_token(self.state)

    def _capture(self) -> None:
        make_static(self.state)
        saved = self.state.clone()
        kept = self.chooser.token_ids.clone()
        step = step_function(self.lm.model, self.state)

        def run() -> None:
            self.chooser.choose(step(self.chooser.token_ids, self.state))

        with use_backend(self.lm.backend):
            self.graph = capture(run, self.lm.device)
        self.state.copy_(saved)
        self.chooser.token_ids.copy_(kept)
