"""Generating text: prefill once, then token by token, for one or several continuations at a time."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from mamba_cli.decoding import decode
from mamba_cli.errors import Mamba2Error
from mamba_cli.machine import check_room
from mamba_cli.sampling import SamplingParams, UniformNumbers
from mamba_cli.stops import StopStrings
from mamba_cli.tokenizer import TextStream

if TYPE_CHECKING:
    from mamba_cli.language_model import LanguageModel


@dataclass(frozen=True)
class Piece:
    """A part of the text of sample number `sample`; the parts of a sample add up to its text."""

    sample: int
    text: str


@dataclass
class Sample:
    """One continuation.

    text: what was generated, ending right before a stop string or the end-of-text token.
    token_ids: every token that was chosen, those of a stop and the end-of-text token too.
    finish_reason: "length", "stop" (a stop string) or "eos".
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = "length"


@dataclass(frozen=True)
class Generation:
    """The last event: all samples and what they took. Seconds do not count the printing of text."""

    samples: list[Sample]
    prompt_tokens: int
    prefill_seconds: float
    decode_seconds: float

    @property
    def generated_tokens(self) -> int:
        """Tokens of all samples together."""
        return sum(len(sample.token_ids) for sample in self.samples)

    @property
    def prefill_tokens_per_second(self) -> float:
        return self.prompt_tokens / self.prefill_seconds

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Of all samples together; None with no step. A first token comes out of the prefill."""
        first_tokens = sum(bool(sample.token_ids) for sample in self.samples)
        tokens = self.generated_tokens - first_tokens
        return tokens / self.decode_seconds if tokens else None


def generate(
    lm: "LanguageModel",
    prompt_ids: Sequence[int],
    params: SamplingParams,
    *,
    max_new_tokens: int,
    stop: Sequence[str] = (),
    ignore_eos: bool = False,
    num_samples: int = 1,
    seed: int = 0,
) -> Iterator[Piece | Generation]:
    """Continue `prompt_ids` (one or more) num_samples times; yield pieces of text, then a Generation.

    A sample ends after max_new_tokens, at a string of `stop`, or at the tokenizer's end-of-text token
    unless ignore_eos. The random numbers of sample i depend on `seed` and i alone. Ids that the
    tokenizer does not know are never chosen. Raises Mamba2Error where the prompt does not fit the
    model, the samples do not fit the memory, or the model's logits are not numbers.
    """
    config, tokenizer = lm.config, lm.tokenizer
    if max(prompt_ids) >= config.vocab_size:
        raise Mamba2Error(
            f"prompt: expected token ids below vocab_size {config.vocab_size}, got {max(prompt_ids)}",
            "name the model's own tokenizer with --tokenizer PATH_OR_REPO",
        )

    start = time.perf_counter()
    logits, state = lm.prefill(torch.tensor([list(prompt_ids)]))
    if not logits[:, : config.vocab_size].isfinite().all():  # asking also waits for the device
        raise Mamba2Error(
            "logits: expected finite numbers, got NaN or infinity",
            f"look for the cause: mamba2 inspect {lm.name} --check",
        )
    prefill_seconds = time.perf_counter() - start

    if num_samples > 1:
        check_room("num-samples", num_samples, state.nbytes, lm.device)
        logits, state = logits.expand(num_samples, -1), state.repeat(num_samples)
    eos_id = None if ignore_eos else tokenizer.eos_id
    rows = [_Row(tokenizer.stream(prompt_ids), StopStrings(stop), eos_id) for _ in range(num_samples)]
    vocab_size = min(config.vocab_size, tokenizer.vocab_size)
    steps = decode(lm, logits, state, params, vocab_size, prompt_ids, UniformNumbers(seed, num_samples))
    decode_seconds = 0.0
    for step in range(max_new_tokens):
        start = time.perf_counter()
        token_ids = next(steps)
        decode_seconds += time.perf_counter() - start if step else 0.0
        for index, (row, token_id) in enumerate(zip(rows, token_ids, strict=True)):
            if text := row.push(token_id):
                yield Piece(index, text)
        if all(row.finished for row in rows):
            break
    for index, row in enumerate(rows):
        if text := row.finish():
            yield Piece(index, text)
    yield Generation([row.sample for row in rows], len(prompt_ids), prefill_seconds, decode_seconds)


class _Row:
    """The text side of one sample."""

    def __init__(self, stream: TextStream, stops: StopStrings, eos_id: int | None):
        self.sample = Sample()
        self.finished = False
        self._stream = stream
        self._stops = stops
        self._eos_id = eos_id

    def push(self, token_id: int) -> str:
        """Take the next token and return the text that is certain now; nothing once finished."""
        if self.finished:
            return ""
        self.sample.token_ids.append(token_id)
        if token_id == self._eos_id:
            self.sample.finish_reason = "eos"
            return self.finish()
        return self._take(self._stream.push(token_id))

    def finish(self) -> str:
        """Take no more tokens, and return the text that was held back for them."""
        if self.finished:
            return ""
        self.finished = True
        return self._take(self._stream.finish())

    def _take(self, text: str) -> str:
        text = self._stops.push(text)
        if self._stops.found:
            self.sample.finish_reason = "stop"
            self.finished = True
        elif self.finished:
            text += self._stops.finish()
        self.sample.text += text
        return text
