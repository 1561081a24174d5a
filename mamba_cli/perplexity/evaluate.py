"""A whole measurement: every batch of the plan scored, by one process or several, in one run or two."""

import hashlib
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mamba_cli.errors import Mamba2Error
from mamba_cli.language_model import BLOCK_TOKENS, LanguageModel
from mamba_cli.machine import check_room
from mamba_cli.perplexity.distributed import Processes
from mamba_cli.perplexity.plan import Plan
from mamba_cli.perplexity.resume import ResumeFile
from mamba_cli.perplexity.score import COMPARISON, NLL, score_batch
from mamba_cli.perplexity.windows import offsets, pack_batches

# Sequences that step side by side when the batch size is left open.
STEP_BATCH = {"cpu": 8, "cuda": 256}

# Called with the predictions just scored and the mean NLL (nats) of all that are scored so far.
Progress = Callable[[int, float], None]


@dataclass(frozen=True)
class Scores:
    """Per-prediction results in reading order, float64 in nats, and how long the scoring took.

    reference_nll, kl (KL(reference || model)) and same_top (bool) are None without a reference.
    tokens_per_second counts the predictions that this run scored itself.
    """

    nll: torch.Tensor
    reference_nll: torch.Tensor | None
    kl: torch.Tensor | None
    same_top: torch.Tensor | None
    batch_size: int
    seconds: float
    tokens_per_second: float


def evaluate(
    lm: LanguageModel,
    plan: Plan,
    batch_size: int | None = None,
    reference: LanguageModel | None = None,
    resume: Path | None = None,
    processes: Processes | None = None,
    progress: Progress | None = None,
) -> Scores:
    """Score every prediction of the plan once.

    batch_size: windows side by side, None for what suits the device. reference: a second model of
    the same vocabulary, compared token by token in the same pass. resume: a file that keeps what is
    done; the run that continues it gives the number that an uninterrupted one gives, bit for bit.
    Raises Mamba2Error where a model answers NaN, or the batch does not fit the device's memory.
    """
    return evaluate_each([lm], plan, batch_size, reference, resume, processes, progress)[0]


def evaluate_each(
    models: Sequence[LanguageModel],
    plan: Plan,
    batch_size: int | None = None,
    reference: LanguageModel | None = None,
    resume: Path | None = None,
    processes: Processes | None = None,
    progress: Progress | None = None,
) -> list[Scores]:
    """Do what `evaluate` does for each of several models, beside one reference that reads the text once.

    Without a reference there is one model. The seconds of all Scores are those of the whole pass, and
    the progress tells the first model's NLL.
    """
    processes = processes or Processes()
    assert reference is not None or len(models) == 1
    models = [*models] if reference is None else [*models, reference]
    _check_vocabulary(models)
    if batch_size:
        state_bytes = sum(lm.init_state(1).nbytes for lm in models)
        check_room("batch-size", min(batch_size, len(plan.windows)), state_bytes, models[0].device)
    file = ResumeFile(resume, _key(models, plan)) if resume and processes.reports else None
    batch_size = batch_size or (file and file.batch_size) or automatic_batch_size(models, plan)
    batch_size = int(processes.from_first(torch.tensor(batch_size)))
    starts = offsets(plan.windows)
    columns = _columns(models)
    scores = torch.full((columns, plan.predictions), torch.nan, dtype=torch.float64)
    if file:
        file.open(batch_size, scores)
    scores = processes.from_first(scores)

    tally = _Tally(progress)
    tally.add(scores[:, ~scores[0].isnan()])
    before, begin = tally.tokens, time.perf_counter()
    batches = pack_batches(plan.windows, batch_size)
    todo = [batch for batch in batches if scores[0, starts[batch[0]]].isnan()]
    try:
        for first in range(0, len(todo), processes.size):
            share = todo[first : first + processes.size]
            places = [_places(batch, starts) for batch in share]
            found = _score_together(models, plan, share, places, processes, tally)
            where = torch.cat(places)
            _refuse_nan(found, where, plan, starts)
            scores[:, where] = found
            if file:
                file.save_when_due(scores)
    finally:
        if file and todo:
            file.save(scores)
    seconds = time.perf_counter() - begin
    rate = (tally.tokens - before) / seconds
    if reference is None:
        return [Scores(scores[0], None, None, None, batch_size, seconds, rate)]
    return [
        Scores(nll, reference_nll, kl, same_top.bool(), batch_size, seconds, rate)
        for nll, reference_nll, kl, same_top in scores.split(len(COMPARISON))
    ]


def automatic_batch_size(models: Sequence[LanguageModel], plan: Plan) -> int:
    """Return how many windows go side by side.

    A model passes BLOCK_TOKENS tokens through its layers at once, whatever it is given: more than that
    fills the device no better. A step is bound by reading the weights, so there more is better until
    the states, which also bound the memory, are what is read. States may take half of what is free.
    """
    device = models[0].device
    longest = max(window.length for window in plan.windows)
    if plan.mode == "step":
        wanted = STEP_BATCH[device.type]
    else:
        wanted = max(1, BLOCK_TOKENS[device.type] // min(plan.window, longest))
    if device.type == "cuda":
        # A carried state exists twice while it is handed on.
        free, _ = torch.cuda.mem_get_info(device)
        states = sum(2 * lm.init_state(1).nbytes for lm in models)
        wanted = min(wanted, max(1, free // 2 // states))
    return min(wanted, len(plan.windows))


class _Tally:
    """Counts what is scored and tells the progress."""

    def __init__(self, progress: Progress | None):
        self.tokens = 0
        self._nll_sum = 0.0
        self._progress = progress

    def add(self, results: torch.Tensor) -> None:
        if not results.shape[1]:
            return
        self.tokens += results.shape[1]
        self._nll_sum += float(results[0].sum())
        if self._progress:
            self._progress(results.shape[1], self._nll_sum / self.tokens)


def _score_together(
    models: Sequence[LanguageModel],
    plan: Plan,
    share: Sequence[Sequence[int]],
    places: Sequence[torch.Tensor],
    processes: Processes,
    tally: _Tally,
) -> torch.Tensor:
    """Score one batch a process; return (columns, predictions) of all of them, in order, everywhere."""
    found = [torch.zeros(_columns(models), len(place), dtype=torch.float64) for place in places]
    if processes.rank < len(share):
        windows = [plan.windows[index] for index in share[processes.rank]]
        documents = [document.ids for document in plan.documents]
        try:
            for where, results in score_batch(models, documents, windows, plan.window, plan.mode == "step"):
                found[processes.rank][:, where] = results
                tally.add(results)
        except torch.OutOfMemoryError:
            raise Mamba2Error(
                f"memory: expected room for {len(windows)} windows of {windows[0].length} tokens, got less",
                hint=f"--batch-size {max(1, len(windows) // 2)}, or a smaller --window",
            ) from None
    together = processes.sum(torch.cat(found, 1))
    for rank, results in enumerate(together.split([len(place) for place in places], 1)):
        if rank != processes.rank:
            tally.add(results)
    return together


def _columns(models: Sequence[LanguageModel]) -> int:
    """Rows of the scores of a model alone, or of models and their reference."""
    return len(NLL) if len(models) == 1 else len(COMPARISON) * (len(models) - 1)


def _places(batch: Sequence[int], starts: Sequence[int]) -> torch.Tensor:
    """Return where the predictions of a batch's windows stand among all of them."""
    return torch.cat([torch.arange(starts[index], starts[index + 1]) for index in batch])


def _check_vocabulary(models: Sequence[LanguageModel]) -> None:
    sizes = [lm.config.vocab_size for lm in models]
    if len(set(sizes)) > 1:
        raise Mamba2Error(f"reference: expected the model's vocabulary of {sizes[0]}, got {sizes[1]}")


def _refuse_nan(found: torch.Tensor, where: torch.Tensor, plan: Plan, starts: Sequence[int]) -> None:
    bad = found.isnan().any(0).nonzero()
    if not len(bad):
        return
    place = int(where[bad].min())
    index = bisect_right(starts, place) - 1
    window = plan.windows[index]
    token = window.scored + place - starts[index] + 1
    raise Mamba2Error(
        f"logits: expected numbers, got NaN where token {token} of document {window.document} is predicted",
        hint="--dtype float32, or mamba2 inspect --check MODEL",
    )


def _key(models: Sequence[LanguageModel], plan: Plan) -> dict[str, object]:
    """Return everything that the scores follow from, but for the batch size."""
    text = hashlib.sha256()
    for document in plan.documents:
        text.update(document.ids.numpy().tobytes())
    key: dict[str, object] = {
        "mode": plan.mode,
        "window": plan.window,
        "stride": plan.stride,
        "tokens": plan.predictions,
        "token ids": text.hexdigest(),
    }
    roles = ["model", *(f"model {number}" for number in range(2, len(models))), "reference"]
    for role, lm in zip(roles, models, strict=False):
        key[role] = f"{lm.name} in {lm.dtype}, state {lm.state_dtype}, on {lm.device.type} by {lm.backend}"
        if lm.state_format is not None:
            key[f"{role}'s state format"] = _state_digest(lm)
        key[f"{role}'s configuration"] = lm.config
        # Other weights under the same name would answer the first tokens otherwise.
        logits, _ = lm.prefill(plan.documents[0].ids[None, :16])
        key[f"{role}'s first answer"] = f"{logits[:, : lm.config.vocab_size].double().sum().item():.4g}"
    return key


def _state_digest(lm: LanguageModel) -> str:
    """Everything about how states are kept, which is too long to be read, in short."""
    digest = hashlib.sha256(repr(lm.state_format).encode())
    for columns in lm.columns or ():
        if columns is not None:
            digest.update(columns.cpu().numpy().tobytes())
    return digest.hexdigest()
