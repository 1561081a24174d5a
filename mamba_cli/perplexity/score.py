"""NLL of the planned predictions of one batch of windows, and what a reference model thinks of them.

Several models may be scored beside one reference, which then reads the text once for all of them.

Whatever the mode, a batch goes through the model from left to right and only the positions whose
predictions count reach the head, in slices, so that memory grows neither with window times
vocabulary nor, carried from chunk to chunk, with the length of a document.
"""

import time
from collections.abc import Iterator, Sequence

import torch

from mamba_cli.language_model import LanguageModel
from mamba_cli.perplexity.windows import Window
from mamba_cli.state import wide_dtype

# Rows of the tensors that scoring returns: for a model alone, and for each model beside a reference.
NLL = ("nll",)
COMPARISON = ("nll", "reference_nll", "kl", "same_top")
# Rows of what is computed on the device for them: _measure's and _compare's.
MEASURED_ROWS, COMPARED_ROWS = 3, 8

# Positions whose logits exist at once: few enough for the memory (a slice at a vocabulary of 50288 is
# 49 or 196 MiB in fp32), enough for the head's weights to be read seldom and the device to be full.
SLICE_ROWS = {"cpu": 256, "cuda": 1024}
# Results come about so often.
YIELD_SECONDS = 0.25


@torch.inference_mode()
def score_batch(
    models: Sequence[LanguageModel],
    documents: Sequence[torch.Tensor],
    windows: Sequence[Window],
    chunk: int,
    stepwise: bool = False,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Score the predictions of `windows`, read side by side; yield results as they come.

    models: the model alone, or models and, last, their reference. documents: token ids (tokens,), prefix
    token included. chunk: tokens read in one call, the state carried from call to call. stepwise: one
    token a call, through the very step that generation takes.

    Yields places (n,), the predictions' indices counted through window after window, and their scores:
    float64 (columns, n) on the CPU, the columns NLL's, or with a reference COMPARISON's, model after
    model: both NLLs and KL(reference || model) in nats, same_top 0 or 1.
    """
    inputs, targets, counted = _side_by_side(documents, windows)
    chunk = 1 if stepwise else chunk
    rows, positions = counted.nonzero(as_tuple=True)
    # Results come chunk by chunk, and inside a chunk row by row.
    order = (positions // chunk).argsort(stable=True)
    device = models[0].device
    wanted = targets[rows, positions][order].to(device)

    slice_rows = SLICE_ROWS[device.type] // len(models)
    streams = [
        _step_logits(lm, inputs, counted)
        if stepwise
        else _chunk_logits(lm, inputs, counted, chunk, slice_rows)
        for lm in models
    ]
    results: list[torch.Tensor] = []
    given = done = 0
    due = time.monotonic() + YIELD_SECONDS
    for logits in zip(*streams, strict=True):
        goal = wanted[done : done + len(logits[0])]
        done += len(goal)
        results.append(_compare_each(logits, goal) if len(models) > 1 else _measure(*logits, goal))
        # Not slice by slice: fetching a result waits for the device.
        if done == len(order) or time.monotonic() > due:
            yield order[given:done], _finish(torch.cat(results, -1).to("cpu", torch.float64))
            given, due = done, time.monotonic() + YIELD_SECONDS
            results.clear()


def _side_by_side(
    documents: Sequence[torch.Tensor], windows: Sequence[Window]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return input ids, target ids and whether a prediction counts, each (windows, longest length).

    Shorter rows are padded on the right, where a causal model cannot look. What counts follows from
    lengths, never from ids: a padding id may well occur in the text.
    """
    shape = (len(windows), max(window.length for window in windows))
    inputs = torch.zeros(shape, dtype=torch.int64)
    targets = torch.zeros(shape, dtype=torch.int64)
    counted = torch.zeros(shape, dtype=torch.bool)
    for row, window in enumerate(windows):
        ids = documents[window.document]
        inputs[row, : window.length] = ids[window.start : window.stop]
        targets[row, : window.length] = ids[window.start + 1 : window.stop + 1]
        counted[row, window.scored - window.start : window.length] = True
    return inputs, targets, counted


def _chunk_logits(
    lm: LanguageModel, inputs: torch.Tensor, counted: torch.Tensor, chunk: int, slice_rows: int
) -> Iterator[torch.Tensor]:
    """Yield logits (rows, vocab_size) of the positions that count, at most `slice_rows` at once."""
    state = None
    for first in range(0, inputs.shape[1], chunk):
        piece = slice(first, first + chunk)
        hidden, state = lm.hidden_states(inputs[:, piece], state)
        for part in hidden[counted[:, piece]].split(slice_rows):
            if len(part):
                yield lm.logits(part)[:, : lm.config.vocab_size]


def _step_logits(lm: LanguageModel, inputs: torch.Tensor, counted: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield logits (rows, vocab_size) of the positions that count, position by position."""
    state = lm.init_state(len(inputs))
    for token_ids, rows in zip(inputs.T.contiguous().to(lm.device), counted.T, strict=True):
        logits = lm.step_(token_ids, state)[:, : lm.config.vocab_size]
        if rows.all():
            yield logits
        elif rows.any():
            yield logits[rows]


def _measure(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return (3, rows): greatest logit, sum of exp(logit - greatest), the wanted token's logit."""
    logits = logits.to(wide_dtype(logits.dtype))
    greatest = logits.amax(-1)
    picked = logits.gather(-1, wanted[:, None]).squeeze(-1)
    total = (logits - greatest[:, None]).exp_().sum(-1)
    return torch.stack([greatest, total, picked])


def _compare_each(logits: Sequence[torch.Tensor], wanted: torch.Tensor) -> torch.Tensor:
    """Return _compare's rows of each model, the last of `logits` being the reference's."""
    *models, reference = logits
    return torch.cat([_compare(model, reference, wanted) for model in models])


def _compare(logits: torch.Tensor, reference: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return (8, rows): _measure's rows of both, KL(reference || logits), whether the tops agree.

    Each token adds q (d - 1) + p to the KL, with d = log(q / p): since p and q both sum to one the sum
    is unchanged, and no term is negative. Near d = 0 that is q (d + expm1(-d)), which does not cancel:
    the divergence of bf16 from fp32 is smaller than fp32's rounding of one log-probability.
    """
    wide = torch.promote_types(wide_dtype(logits.dtype), wide_dtype(reference.dtype))
    p, q = logits.to(wide), reference.to(wide)
    ours, theirs = _measure(p, wanted), _measure(q, wanted)
    same_top = p.argmax(-1) == q.argmax(-1)
    log_p = p - (ours[0] + ours[1].log())[:, None]
    log_q = q - (theirs[0] + theirs[1].log())[:, None]
    p, q, d = log_p.exp(), log_q.exp(), log_q - log_p
    terms = torch.where(d.abs() < 1, q * (d + torch.expm1(-d)), q * (d - 1) + p)
    kl = torch.where(q > 0, terms, p).sum(-1)
    return torch.cat([ours, theirs, kl[None], same_top[None].to(wide)])


def _finish(scores: torch.Tensor) -> torch.Tensor:
    """Turn _measure's and _compare's rows, now float64, into NLL's and COMPARISON's columns.

    The logarithm is taken here, in float64, so that equal logits give exactly the log of their number.
    """
    if len(scores) == MEASURED_ROWS:
        return _nll(scores)[None]
    return torch.cat(
        [torch.stack([_nll(rows[:3]), _nll(rows[3:6]), *rows[6:]]) for rows in scores.split(COMPARED_ROWS)]
    )


def _nll(measured: torch.Tensor) -> torch.Tensor:
    greatest, total, picked = measured
    return total.log() + (greatest - picked)
