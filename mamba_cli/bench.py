"""How fast a model runs: prefill and decode, by batch size, length of the prompt and tokens generated."""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from mamba_cli.ceilings import Ceilings, synchronize
from mamba_cli.decoding import decode
from mamba_cli.errors import Mamba2Error
from mamba_cli.language_model import LanguageModel
from mamba_cli.load import random_model
from mamba_cli.machine import peak_memory, reset_peak_memory
from mamba_cli.sampling import SamplingParams, UniformNumbers
from mamba_cli.shapes import published_config
from mamba_cli.state import State
from mamba_cli.work import Work, WorkCounter

GREEDY = SamplingParams(temperature=0)

# Prefills that are discarded. On a GPU the first compiles kernels and the second of its shape captures
# the graph that all later ones replay.
PREFILL_WARM_UPS = {"cpu": 1, "cuda": 2}

Advance = Callable[..., None]


@dataclass(frozen=True)
class Measurement:
    """One kind of run, repeated.

    phase: "prefill", the reading of a prompt from no state until the last position's logits are there;
    or "decode", `generate` steps of the loop of mamba_cli.decoding after such a prompt, greedy, each
    token read back. generate is 0 for prefill. seconds: of each repetition. work: of one repetition.
    peak_memory: bytes, in the sense of machine.PEAK_MEMORY, warm-up and capture of graphs included, and
    for decode the copy of the state that the next repetition starts from.
    """

    phase: str
    batch_size: int
    prompt_length: int
    generate: int
    seconds: tuple[float, ...]
    work: Work
    peak_memory: int | None

    @property
    def tokens(self) -> int:
        """Tokens of one repetition, all sequences together."""
        return self.batch_size * (self.generate or self.prompt_length)

    @property
    def rates(self) -> list[float]:
        """Tokens a second of each repetition."""
        return [self.tokens / seconds for seconds in self.seconds]

    def figures(self, ceilings: Ceilings) -> dict[str, str | int | float | None]:
        """Return one row of a result.

        The deviation is that of a sample, None for one repetition; milliseconds are those of a prompt
        or of a step, at the mean rate; GB and TFLOP are powers of 10; shares are of `ceilings`.
        """
        rate = statistics.mean(self.rates)
        runs = rate / self.tokens
        return {
            "phase": self.phase,
            "batch_size": self.batch_size,
            "prompt_length": self.prompt_length,
            "generate": self.generate,
            "tokens_per_second": rate,
            "tokens_per_second_deviation": statistics.stdev(self.rates) if len(self.rates) > 1 else None,
            "milliseconds": 1e3 / runs / (self.generate or 1),
            "gb_per_second": runs * self.work.nbytes / 1e9,
            "bandwidth_share": runs * self.work.nbytes / ceilings.bytes_per_second,
            "tflop_per_second": runs * self.work.operations / 1e12,
            "matmul_share": runs * self.work.operations / ceilings.operations_per_second,
            "peak_memory_bytes": self.peak_memory,
        }


def published_model(
    shape: str, device: str, dtype: str, backend: str, state_dtype: str | None = None
) -> LanguageModel:
    """Return a model of a published shape with random weights; dtype "auto" is bfloat16."""
    dtype = "bfloat16" if dtype == "auto" else dtype
    config = published_config(shape)
    lm = random_model(config, device, dtype, backend, on_device=True)
    lm.name = f"{shape} with random weights"
    return lm if state_dtype is None else lm.with_state(state_dtype)


def count_runs(
    batch_sizes: Sequence[int], prompt_lengths: Sequence[int], generate: Sequence[int], repetitions: int
) -> int:
    """Return how often `measure` calls `advance`."""
    phases = 1 + sum(map(bool, generate))
    return len(batch_sizes) * len(prompt_lengths) * phases * repetitions


def measure(
    lm: LanguageModel,
    batch_sizes: Sequence[int],
    prompt_lengths: Sequence[int],
    generate: Sequence[int],
    repetitions: int,
    advance: Advance = lambda amount, label=None: None,
) -> Iterator[Measurement]:
    """Yield a prefill for each batch size and prompt length, and a decode for each number in `generate`.

    Every measurement repeats its run `repetitions` times after a warm-up that is discarded. A 0 in
    `generate` stands for no decode. advance(1, label) is called after each repetition. Raises Mamba2Error
    where a GPU's memory does not suffice.
    """
    work = WorkCounter(lm.config, lm.dtype, lm.ssm_dtype, lm.state_format)
    generator = torch.Generator().manual_seed(0)
    for batch in batch_sizes:
        for length in prompt_lengths:
            label = f"batch {batch}, prompt {length}"
            ids = torch.randint(lm.config.vocab_size, (batch, length), generator=generator)
            with _naming_what_does_not_fit(lm, label):
                prefill = _Prefill(lm, ids)
                warm_ups = PREFILL_WARM_UPS[lm.device.type]
                seconds, peak = _repeat(lm, prefill, warm_ups, repetitions, partial(advance, 1, label))
                yield Measurement("prefill", batch, length, 0, seconds, work.prefill(batch, length), peak)
                for steps in filter(None, generate):
                    run = _Decode(lm, prefill.logits, prefill.state, steps)
                    seconds, peak = _repeat(lm, run, 1, repetitions, partial(advance, 1, label))
                    yield Measurement(
                        "decode", batch, length, steps, seconds, work.decode(batch, length, steps), peak
                    )


@dataclass
class _Prefill:
    """Reads a prompt and keeps what comes out, for the decoding after it."""

    lm: LanguageModel
    ids: torch.Tensor
    logits: torch.Tensor | None = None
    state: State | None = None

    def __call__(self) -> float:
        self.logits = self.state = None  # two states at a time would be counted as memory that it takes
        start = time.perf_counter()
        self.logits, self.state = self.lm.prefill(self.ids)
        synchronize(self.lm.device)
        return time.perf_counter() - start


@dataclass
class _Decode:
    """Generates after a prompt. The first token comes out of the prefill, so it is not timed."""

    lm: LanguageModel
    logits: torch.Tensor
    state: State
    steps: int

    def __call__(self) -> float:
        no_prompt, no_numbers = (), UniformNumbers(0, self.state.batch)  # a greedy choice asks for neither
        tokens = decode(
            self.lm,
            self.logits,
            self.state.clone(),
            GREEDY,
            self.lm.config.vocab_size,
            no_prompt,
            no_numbers,
        )
        next(tokens)
        start = time.perf_counter()
        for _ in range(self.steps):
            next(tokens)
        return time.perf_counter() - start


def _repeat(
    lm: LanguageModel, run: Callable[[], float], warm_ups: int, repetitions: int, advance: Callable[[], None]
) -> tuple[tuple[float, ...], int | None]:
    """Return the seconds of each repetition after the warm-ups, and the peak of memory of all together."""
    lm.release_graphs()  # those of another shape would count to this one's memory, or hide its own
    reset_peak_memory(lm.device)
    for _ in range(warm_ups):
        run()
    seconds = []
    for _ in range(repetitions):
        seconds.append(run())
        advance()
    return tuple(seconds), peak_memory(lm.device)


@contextlib.contextmanager
def _naming_what_does_not_fit(lm: LanguageModel, label: str) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise Mamba2Error(
            f"{label}: expected it to fit the memory of {lm.device}, got out of memory",
            "try smaller batches, shorter prompts or a narrower --dtype",
        ) from error
