"""The next token of every row of a batch, chosen from logits, for decoding in a CUDA graph.

    l'    = l / penalty where l > 0, l * penalty elsewhere; of tokens seen before (Keskar et al. 2019,
            https://arxiv.org/abs/1909.05858, section 4.1)
    w     = exp((l' - max l') / temperature)
    top_k   keeps the k largest w, and what equals the last of them
    top_p   keeps, of those k, the fewest largest that together reach top_p of their sum (Holtzman et al.
            2020, https://arxiv.org/abs/1904.09751, section 3.1), and what equals the last of them
    min_p   keeps w >= min_p
    token = the first whose cumulative sum of what is kept, in the order of ids, passes uniform * all of it

A temperature of 0 takes the largest l', the first of equals; NaN counts as the largest, as in torch.argmax.
A row whose weights are not numbers, since its largest logit is none or not finite, gets token 0.
"""

from typing import Any

import torch

from mamba_kernels.backend import backend_for
from mamba_kernels.checks import check, check_device, check_shape

# Weights are float32; beyond this they would all be alike, and infinite logits would make NaN.
LARGEST_TEMPERATURE = 1e30


def choose_token(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    *,
    vocab_size: int,
    turn: torch.Tensor,
    repetition_penalty: float = 1.0,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    uniform: torch.Tensor | None = None,
    seen: torch.Tensor | None = None,
    history: torch.Tensor | None = None,
    pdl: bool = False,
    config: dict[str, Any] | None = None,
) -> None:
    """Fill `token_ids` with the choice of each row; waits for nothing, so that it can be captured.

    The Triton kernel chooses as the reference does, except where rounding can decide: where the row's
    number lies within about 1e-6 of the sum on a boundary between two tokens, or a threshold as near a
    weight.

    Args:
        logits: (batch, at least vocab_size), floating, unit stride along a row. Columns from vocab_size on
            are padding and are not looked at.
        token_ids: int64 (batch,), contiguous.
        turn: int64 (batch,), contiguous: how many choices came before; advanced by 1.
        uniform: float64 (turns, batch), contiguous, in [0, 1): the number of each turn. None where
            temperature is 0.
        seen: bool, of the shape of logits, contiguous: what repetition_penalty applies to; the choice is
            added.
        history: int64 (slots, batch), contiguous: the choice goes to slot turn % slots as well.
        temperature: 0, or at least 1e-9. top_k: 0 is off. top_p: 1 is off. min_p: 0 is off.
        pdl: lets the kernel be launched while the one ahead of it in the stream still runs.
    """
    batch = logits.shape[0]
    check(0 < vocab_size <= logits.shape[1], "vocab_size", f"from 1 to {logits.shape[1]}", vocab_size)
    check(logits.stride(1) == 1, "logits", "unit stride along a row", f"strides {logits.stride()}")
    check_shape("token_ids", token_ids, (batch,))
    check_shape("turn", turn, (batch,))
    check(temperature == 0 or temperature >= 1e-9, "temperature", "0 or at least 1e-9", temperature)
    check(temperature == 0 or uniform is not None, "uniform", "numbers, where temperature is not 0", None)
    check_shape("seen", seen, logits.shape)
    check_shape("uniform", uniform, (0 if uniform is None else uniform.shape[0], batch))
    check_shape("history", history, (0 if history is None else history.shape[0], batch))
    for name, tensor, dtype in (
        ("token_ids", token_ids, torch.int64), ("turn", turn, torch.int64), ("seen", seen, torch.bool),
        ("history", history, torch.int64), ("uniform", uniform, torch.float64),
    ):  # fmt: skip
        if tensor is not None:
            check(tensor.dtype == dtype, name, dtype, tensor.dtype)
            check(tensor.is_contiguous(), name, "a contiguous tensor", f"strides {tensor.stride()}")
    check_device(logits.device, token_ids=token_ids, turn=turn, uniform=uniform, seen=seen, history=history)
    penalised = seen if repetition_penalty != 1 else None
    if backend_for(logits.device) == "triton":
        from mamba_kernels.choose_token_triton import launch_greedy, launch_sample

        target = (token_ids, turn, history, seen)
        if temperature == 0:
            launch_greedy(logits, vocab_size, penalised, repetition_penalty, *target, pdl, config)
        else:
            launch_sample(
                logits, vocab_size, penalised, repetition_penalty, *target, uniform,
                temperature, top_k, top_p, min_p, pdl, config,
            )  # fmt: skip
        return
    number = None if uniform is None else uniform.gather(0, turn[None])[0]
    chosen = choose_token_ref(
        logits, vocab_size=vocab_size, repetition_penalty=repetition_penalty, temperature=temperature,
        top_k=top_k, top_p=top_p, min_p=min_p, uniform=number,
        seen=None if penalised is None else penalised[:, :vocab_size],
    )  # fmt: skip
    token_ids.copy_(chosen)
    if seen is not None:
        seen.scatter_(1, chosen[:, None], True)
    if history is not None:
        history.scatter_(0, (turn % history.shape[0])[None], chosen[None])
    turn.add_(1)


def choose_token_ref(
    logits: torch.Tensor,
    *,
    vocab_size: int,
    repetition_penalty: float = 1.0,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    uniform: torch.Tensor | None = None,
    seen: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the choice of each row: int64 (batch,).

    As choose_token, but uniform: float64 (batch,), the numbers of this turn; seen: bool (batch, vocab_size).
    Off the CPU it neither waits for the device nor has shapes that depend on data. Weights are float32, or
    float64 where logits are; their sums are float64.
    """
    logits = logits[:, :vocab_size]
    penalised = seen is not None and repetition_penalty != 1
    if temperature == 0 and not penalised and logits.is_cuda:
        return logits.argmax(-1)  # widening first is the faster way on a CPU only
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if penalised:
        changed = (logits / repetition_penalty).where(logits > 0, logits * repetition_penalty)
        logits = logits.where(~seen, changed)
    if temperature == 0:
        return logits.argmax(-1)
    assert uniform is not None
    # Relative to the row's largest, no temperature is small enough to overflow.
    largest = logits.amax(-1, keepdim=True)
    weights = ((logits - largest) / min(temperature, LARGEST_TEMPERATURE)).exp()
    least = None
    if 0 < top_k < vocab_size:
        least = _nucleus(weights.topk(top_k, -1).values, top_p)
    elif top_p < 1 and weights.device.type == "cpu":
        least = _nucleus_in_buckets(weights, top_p)
    elif top_p < 1:
        least = _nucleus(weights.sort(-1, descending=True).values, top_p)
    if least is not None:
        weights = weights.where(weights >= least, 0)
    if min_p > 0:
        weights = weights.where(weights >= min_p, 0)  # the largest weight is 1
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    chosen = torch.searchsorted(cumulative, uniform[:, None] * total, right=True)
    return chosen.where(total > 0, 0)[:, 0]  # nor is it where weights are NaN


def _nucleus(weights: torch.Tensor, top_p: float) -> torch.Tensor:
    """The smallest, (batch, 1), of the fewest largest that reach top_p of the sum of weights, descending."""
    wide = weights.double()
    cumulative = wide.cumsum(-1)
    within = (cumulative - wide) < top_p * cumulative[:, -1:]
    return weights.where(within, weights[:, :1]).amin(-1, keepdim=True)


def _nucleus_in_buckets(weights: torch.Tensor, top_p: float) -> torch.Tensor:
    """The same of weights in any order, on the CPU: sorting a vocabulary would cost more than all else.

    Weights that share their leading 16 bits are a bucket. The sums of the buckets tell which one top_p is
    reached in, and that alone is sorted.
    """
    least = weights.new_full((weights.shape[0], 1), torch.nan)
    for row, smallest in zip(weights, least, strict=True):
        if row.isnan().any():
            continue
        buckets = row.float().view(torch.int32) >> 16
        sums = torch.bincount(buckets, row.double())
        from_top = sums.flip(0).cumsum(0)  # buckets in falling order, each with those above it
        reached = torch.searchsorted(from_top, top_p * from_top[-1]).clamp_(max=len(sums) - 1)
        bucket = len(sums) - 1 - reached
        inside = row[buckets == bucket].sort(descending=True).values.double()
        before = from_top[reached] - sums[bucket] + inside.cumsum(0) - inside
        within = (before < top_p * from_top[-1]).sum().clamp_(min=1)
        smallest[0] = inside[within - 1]
    return least
