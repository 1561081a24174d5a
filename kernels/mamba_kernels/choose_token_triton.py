"""Triton kernels that choose a token: one program a row, which reads the row from the L2 cache.

A lane is what lies at one place of all blocks of a row. The lanes' largest logits stay in registers, and the
few lanes that can hold one of the top_k logits, or the nucleus, are read again. What they hold is compared
pair by pair, which sorts nothing. Where that is too much (a large top_k, a wide nucleus, equal logits),
thresholds are searched for over the whole row instead.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from mamba_kernels.choose_token import LARGEST_TEMPERATURE
from mamba_kernels.choose_token_search_triton import (
    NONE,
    choose_by_search,
    fetch,
    penalise,
    prepare,
    sum_weights,
    weigh,
)
from mamba_kernels.decode_norm_triton import early_start, start_next, wait_for_previous
from mamba_kernels.triton_launch import stride_unit
from mamba_kernels.triton_math import LOG2E

# exp2 of less is 0 in float32: what lies as far below the largest logit, as an exponent, has no weight.
SMALLEST_EXPONENT = 150.0
# Candidates that are compared pair by pair: more of them take longer than a search.
MOST_CANDIDATES = 512


@triton.jit
def _finish(token, row, turn, batch, columns, token_ptr, turn_ptr, history_ptr, slots, seen_ptr):
    """Put the choice where it belongs and count it: `turn` was loaded before the threads last met."""
    tl.store(token_ptr + row, token.to(tl.int64))
    tl.store(turn_ptr + row, turn + 1)
    if history_ptr is not None:
        tl.store(history_ptr + turn % slots * batch + row, token.to(tl.int64))
    if seen_ptr is not None:
        tl.store(seen_ptr + row.to(tl.int64) * columns + token, 1)


@triton.jit
def _greedy_kernel(
    logits_ptr, penalised_ptr, token_ptr, turn_ptr, history_ptr, seen_ptr,
    columns, vocab_size, batch, slots, stride, penalty,
    UNIT: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row of the batch). UNROLL blocks are asked for before the first is looked at."""
    start_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0)
    turn = tl.load(turn_ptr + row)
    logits_ptr += row.to(tl.int64) * stride * UNIT
    columns *= UNIT
    if penalised_ptr is not None:
        penalised_ptr += row.to(tl.int64) * columns
    lane = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_block = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, vocab_size, UNROLL * BLOCK):
        blocks = fetch(logits_ptr, begin, columns, BLOCK, UNROLL)
        for i in tl.static_range(UNROLL):
            start = begin + i * BLOCK
            x = prepare(blocks[i], penalised_ptr, start, columns, vocab_size, penalty, BLOCK)
            better = (x > best) | ((x != x) & (best == best))  # NaN is above all else
            best = tl.where(better, x, best)
            best_block = tl.where(better, start, best_block)
    # One integer orders the lanes: by the bits of their logit, with 0 for -0, then by the lowest id.
    bits = (best + 0.0).to(tl.int32, bitcast=True)
    order = tl.where(best == best, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), 0x7FFFFFFF)
    top = tl.max((order.to(tl.int64) << 32) | ((best_block + lane) ^ NONE).to(tl.int64), axis=0)
    token = (top & 0xFFFFFFFF).to(tl.int32) ^ NONE
    _finish(token, row, turn, batch, columns, token_ptr, turn_ptr, history_ptr, slots, seen_ptr)


@triton.jit
def _choose_by_pairs(
    x_ptr, id_ptr, count, total, largest, scale, uniform, top_k, top_p, min_p,
    HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr, ROOM: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The choice among `count` candidates in the order of their ids, the largest of their row.

    Without top_k, `total` is the sum of the row's weights, and NONE is returned where the candidates do not
    reach top_p of it.
    """
    place = tl.arange(0, ROOM)
    x = tl.load(x_ptr + place, mask=place < count, other=float("-inf"))
    ids = tl.load(id_ptr + place, mask=place < count, other=0)
    w = weigh(x, largest, scale)
    greater = tl.zeros((ROOM, CHUNK), tl.int32)
    mass = tl.zeros((ROOM, CHUNK), tl.float64)
    for begin in range(0, count, CHUNK):
        other_place = begin + tl.arange(0, CHUNK)
        other = tl.load(x_ptr + other_place, mask=other_place < count, other=float("-inf"))
        other = weigh(other, largest, scale)
        is_greater = other[None, :] > w[:, None]
        greater += is_greater.to(tl.int32)
        mass += tl.where(is_greater, other[None, :], 0.0).to(tl.float64)
    rank = tl.sum(greater, axis=1)
    kept = w > 0
    if HAS_TOP_K:
        kept = kept & (rank < top_k)
        # The sum of exactly top_k weights, of those that equal the last as many as are needed.
        last = tl.min(tl.where(kept, w, float("inf")), axis=0)
        needed = tl.minimum(
            tl.sum((w == last).to(tl.int32), axis=0), top_k - tl.sum((w > last).to(tl.int32), axis=0)
        )
        total = tl.sum(tl.where(w > last, w, 0.0).to(tl.float64), axis=0)
        total += needed.to(tl.float64) * last.to(tl.float64)
    if HAS_TOP_P:
        kept = kept & ((tl.sum(mass, axis=1) < top_p * total) | (rank == 0))
    kept = kept & (w >= min_p)
    cumulative = tl.cumsum(tl.where(kept, w, 0.0).to(tl.float64), axis=0)
    target = uniform * tl.max(tl.where(kept, cumulative, 0.0), axis=0)
    token = tl.min(tl.where(kept & (cumulative > target), ids, NONE), axis=0)
    if not HAS_TOP_K:
        token = tl.where(tl.sum(w.to(tl.float64), axis=0) < top_p * total, NONE, token)
    return token


@triton.jit(do_not_specialize=["top_k"])
def _sample_kernel(
    logits_ptr, penalised_ptr, token_ptr, turn_ptr, history_ptr, seen_ptr, uniform_ptr, work_ptr,
    columns, vocab_size, batch, slots, stride, penalty, scale, reach, top_k, top_p, min_p,
    UNIT: tl.constexpr, HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr, ROOM: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row of the batch).

    ROOM: candidates that are compared pair by pair; 0: the row is searched for thresholds. BLOCKS: at least
    the blocks of a row, a power of two. work: int32 (batch, 3 * ROOM), see below.
    """
    start_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0)
    turn = tl.load(turn_ptr + row)
    logits_ptr += row.to(tl.int64) * stride * UNIT
    columns *= UNIT
    if penalised_ptr is not None:
        penalised_ptr += row.to(tl.int64) * columns
    lane = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    for begin in range(0, vocab_size, UNROLL * BLOCK):
        blocks = fetch(logits_ptr, begin, columns, BLOCK, UNROLL)
        for i in tl.static_range(UNROLL):
            start = begin + i * BLOCK
            x = prepare(blocks[i], penalised_ptr, start, columns, vocab_size, penalty, BLOCK)
            best = tl.maximum(best, x, propagate_nan=tl.PropagateNan.ALL)
    largest = tl.max(tl.where(best == best, best, float("inf")), axis=0)
    uniform = tl.load(uniform_ptr + turn * batch + row)

    token = 0
    if (largest > float("-inf")) & (largest < float("inf")):
        search = True
        if ROOM > 0:
            # A logit that top_k lanes reach is not above the last of the top_k. Halve until that many reach
            # it but few more, as other logits of these lanes are candidates, too. Without top_k, the nucleus
            # is hoped to lie among as many as there is room for.
            wanted = top_k if HAS_TOP_K else ROOM // 2
            low = largest - reach
            high = largest
            count = tl.sum((best >= low).to(tl.int32), axis=0)
            rounds = 0
            while (count > ROOM // 4 * 3) & (rounds < 30):
                middle = low + (high - low) * 0.5
                reaching = tl.sum((best >= middle).to(tl.int32), axis=0)
                enough = reaching >= wanted
                low = tl.where(enough, middle, low)
                high = tl.where(enough, high, middle)
                count = tl.where(enough, reaching, count)
                rounds += 1
            # No weight below may equal that of a logit above, by rounding: take what lies as near as well.
            low -= (largest - low + reach) * (2.0**-20)
            active = best >= low
            count = tl.sum(active.to(tl.int32), axis=0)
            if count <= ROOM:
                # The lanes, in order; then from all their blocks the candidates, in the order of ids.
                lanes_ptr = work_ptr + row * (3 * ROOM)
                id_ptr = lanes_ptr + ROOM
                x_ptr = (id_ptr + ROOM).to(tl.pointer_type(tl.float32), bitcast=True)
                tl.store(lanes_ptr + tl.cumsum(active.to(tl.int32), axis=0) - 1, lane, mask=active)
                tl.debug_barrier()
                place = tl.arange(0, ROOM)
                lanes = tl.load(lanes_ptr + place, mask=place < count, other=0)
                ids = tl.arange(0, BLOCKS)[:, None] * BLOCK + lanes[None, :]
                mask = (place < count)[None, :] & (ids < vocab_size)
                x = tl.load(logits_ptr + ids, mask=mask, other=float("-inf")).to(tl.float32)
                x = penalise(x, penalised_ptr, ids, mask, penalty)
                x = tl.reshape(x, (BLOCKS * ROOM,))
                ids = tl.reshape(ids, (BLOCKS * ROOM,))
                is_candidate = x >= low
                count = tl.sum(is_candidate.to(tl.int32), axis=0)
                place = tl.cumsum(is_candidate.to(tl.int32), axis=0) - 1
                if count <= ROOM:
                    tl.store(id_ptr + place, ids, mask=is_candidate)
                    tl.store(x_ptr + place, x, mask=is_candidate)
                    tl.debug_barrier()
                    total = tl.full((), 0.0, tl.float64)
                    if not HAS_TOP_K:
                        total = sum_weights(
                            logits_ptr, penalised_ptr, columns, vocab_size, penalty, largest, scale, 0.0,
                            BLOCK, UNROLL,
                        )  # fmt: skip
                    token = _choose_by_pairs(
                        x_ptr, id_ptr, count, total, largest, scale, uniform, top_k, top_p, min_p,
                        HAS_TOP_K, HAS_TOP_P, ROOM, CHUNK,
                    )  # fmt: skip
                    search = token == NONE
        if search:
            token = choose_by_search(
                logits_ptr, penalised_ptr, columns, vocab_size, penalty, largest, scale, reach,
                uniform, top_k, top_p, min_p, HAS_TOP_K, HAS_TOP_P, BLOCK, UNROLL // 2,
            )  # fmt: skip
    _finish(token, row, turn, batch, columns, token_ptr, turn_ptr, history_ptr, slots, seen_ptr)


def config_for(logits: torch.Tensor) -> dict[str, int]:
    """Block sizes: 16 bytes a thread and load, and the row of a vocabulary of 50,000 in one go."""
    warps = 16
    return {"BLOCK": 32 * warps * 16 // max(2, logits.element_size()), "UNROLL": 8, "num_warps": warps}


def launch_greedy(
    logits: torch.Tensor,
    vocab_size: int,
    penalised: torch.Tensor | None,
    penalty: float,
    token_ids: torch.Tensor,
    turn: torch.Tensor,
    history: torch.Tensor | None,
    seen: torch.Tensor | None,
    pdl: bool,
    config: dict[str, Any] | None,
) -> None:
    """Take the largest of each row."""
    batch = logits.shape[0]
    unit = stride_unit(logits.stride(0), logits.shape[1])
    with torch.cuda.device_of(logits):
        _greedy_kernel[(batch,)](
            logits, _as_bytes(penalised), token_ids, turn, history, _as_bytes(seen),
            logits.shape[1] // unit, vocab_size, batch, 1 if history is None else history.shape[0],
            logits.stride(0) // unit, penalty,
            UNIT=unit, **(config or config_for(logits)), **early_start(pdl, logits),
        )  # fmt: skip


def launch_sample(
    logits: torch.Tensor,
    vocab_size: int,
    penalised: torch.Tensor | None,
    penalty: float,
    token_ids: torch.Tensor,
    turn: torch.Tensor,
    history: torch.Tensor | None,
    seen: torch.Tensor | None,
    uniform: torch.Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    pdl: bool,
    config: dict[str, Any] | None,
) -> None:
    """Sample each row; allocates a work area for the candidates."""
    batch = logits.shape[0]
    unit = stride_unit(logits.stride(0), logits.shape[1])
    has_top_k = 0 < top_k < vocab_size
    room = 0
    if has_top_k:
        room = max(128, triton.next_power_of_2(2 * top_k))
    elif top_p < 1:
        room = MOST_CANDIDATES
    room = 0 if room > MOST_CANDIDATES else room
    config = {"ROOM": room, "CHUNK": 4096 // max(room, 128)} | (config or config_for(logits))
    scale = LOG2E.value / min(temperature, LARGEST_TEMPERATURE)
    work = torch.empty(batch, 3 * config["ROOM"], dtype=torch.int32, device=logits.device)
    with torch.cuda.device_of(logits):
        _sample_kernel[(batch,)](
            logits, _as_bytes(penalised), token_ids, turn, history, _as_bytes(seen), uniform, work,
            logits.shape[1] // unit, vocab_size, batch, 1 if history is None else history.shape[0],
            logits.stride(0) // unit, penalty,
            scale, SMALLEST_EXPONENT / scale, top_k, top_p, min_p,
            UNIT=unit, HAS_TOP_K=has_top_k, HAS_TOP_P=top_p < 1,
            BLOCKS=triton.next_power_of_2(triton.cdiv(vocab_size, config["BLOCK"])),
            **config, **early_start(pdl, logits),
        )  # fmt: skip


def _as_bytes(flags: torch.Tensor | None) -> torch.Tensor | None:
    return None if flags is None else flags.view(torch.uint8)
