"""Triton pieces of the choice of a token that read the whole row, once or many times.

A row of logits is read in blocks of BLOCK columns, UNROLL of them at a time: all are asked for before the
first is looked at.
"""

import triton
import triton.language as tl

NONE = tl.constexpr(2**31 - 1)  # no token has this id


@triton.jit
def penalise(x, seen_ptr, ids, mask, penalty):
    """Logits x, float32, after the repetition penalty."""
    if seen_ptr is not None:
        seen = tl.load(seen_ptr + ids, mask=mask, other=0) != 0
        x = tl.where(seen, tl.where(x > 0, tl.div_rn(x, penalty + tl.zeros_like(x)), x * penalty), x)
    return x


@triton.jit
def fetch(logits_ptr, begin, columns, BLOCK: tl.constexpr, COUNT: tl.constexpr):
    """COUNT blocks as they are stored, all asked for before the first is looked at.

    The mask is of all columns, padding too: these end on a vector, unlike the tokens.
    """
    blocks = ()
    for i in tl.static_range(COUNT):
        ids = begin + i * BLOCK + tl.arange(0, BLOCK)
        blocks += (tl.load(logits_ptr + ids, mask=ids < columns, other=float("-inf")),)
    return blocks


@triton.jit
def prepare(block, seen_ptr, begin, columns, vocab_size, penalty, BLOCK: tl.constexpr):
    """A block in float32 after the repetition penalty; -inf where there is no token."""
    ids = begin + tl.arange(0, BLOCK)
    x = penalise(block.to(tl.float32), seen_ptr, ids, ids < columns, penalty)
    if begin + BLOCK > vocab_size:  # also keeps the assembler from moving loads to where they are needed
        x = tl.where(ids < vocab_size, x, float("-inf"))
    return x


@triton.jit
def weigh(x, largest, scale):
    """exp((x - largest) / temperature), where scale is log2(e) / temperature."""
    return tl.exp2((x - largest) * scale)


@triton.jit
def _threshold(
    logits_ptr, penalised_ptr, columns, vocab_size, penalty, largest, scale, low, bound,
    MASS: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """The smallest logit above `low` that has less than `bound` above it, in weight (MASS) or in number.

    `low` itself where all that lies above it has less. Bounds move to logits that exist, so that the search
    ends as soon as nothing lies between them.
    """
    high = largest
    while low < high:
        middle = low + (high - low) * 0.5
        middle = tl.where(middle > low, middle, high)  # they may be neighbours
        measure = tl.zeros((BLOCK,), tl.float32)
        above = tl.full((BLOCK,), float("inf"), tl.float32)
        below = tl.full((BLOCK,), float("-inf"), tl.float32)
        for group in range(0, vocab_size, UNROLL * BLOCK):
            blocks = fetch(logits_ptr, group, columns, BLOCK, UNROLL)
            for i in tl.static_range(UNROLL):
                begin = group + i * BLOCK
                x = prepare(blocks[i], penalised_ptr, begin, columns, vocab_size, penalty, BLOCK)
                is_above = x >= middle
                measure += tl.where(is_above, weigh(x, largest, scale) if MASS else 1.0, 0.0)
                above = tl.minimum(above, tl.where(is_above, x, float("inf")))
                below = tl.maximum(below, tl.where(is_above, float("-inf"), x))
        less = tl.sum(measure.to(tl.float64), axis=0) < bound
        high = tl.where(less, tl.maximum(tl.max(below, axis=0), low), high)
        low = tl.where(less, low, tl.min(above, axis=0))
    return low


@triton.jit
def sum_weights(
    logits_ptr, penalised_ptr, columns, vocab_size, penalty, largest, scale, least,
    BLOCK: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """The sum of the weights of at least `least`, block after block, in float64."""
    total = tl.full((), 0.0, tl.float64)
    for group in range(0, vocab_size, UNROLL * BLOCK):
        blocks = fetch(logits_ptr, group, columns, BLOCK, UNROLL)
        for i in tl.static_range(UNROLL):
            begin = group + i * BLOCK
            x = prepare(blocks[i], penalised_ptr, begin, columns, vocab_size, penalty, BLOCK)
            w = weigh(x, largest, scale)
            total += tl.sum(tl.where(w >= least, w, 0.0).to(tl.float64), axis=0)
    return total


@triton.jit
def choose_by_search(
    logits_ptr, penalised_ptr, columns, vocab_size, penalty, largest, scale, reach,
    uniform, top_k, top_p, min_p,
    HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """The choice from the whole row: thresholds first, then the sums of what is kept."""
    lane = tl.arange(0, BLOCK)
    low = largest - reach
    least = min_p
    if HAS_TOP_K:
        low = _threshold(
            logits_ptr, penalised_ptr, columns, vocab_size, penalty, largest, scale, low,
            top_k, False, BLOCK, UNROLL,
        )  # fmt: skip
        least = tl.maximum(least, weigh(low, largest, scale))
    if HAS_TOP_P:
        # The sum of exactly top_k weights, of those that equal the last as many as are needed.
        last = weigh(low, largest, scale)
        sums = tl.zeros((BLOCK,), tl.float64)
        greater = tl.zeros((BLOCK,), tl.int32)
        equal = tl.zeros((BLOCK,), tl.int32)
        for group in range(0, vocab_size, UNROLL * BLOCK):
            blocks = fetch(logits_ptr, group, columns, BLOCK, UNROLL)
            for i in tl.static_range(UNROLL):
                begin = group + i * BLOCK
                x = prepare(blocks[i], penalised_ptr, begin, columns, vocab_size, penalty, BLOCK)
                w = weigh(x, largest, scale)
                sums += tl.where(w > last, w, 0.0).to(tl.float64)
                greater += (w > last).to(tl.int32)
                equal += (w == last).to(tl.int32)
        total = tl.sum(sums, axis=0)
        needed = tl.sum(equal, axis=0)
        if HAS_TOP_K:
            needed = tl.minimum(needed, top_k - tl.sum(greater, axis=0))
        total += needed.to(tl.float64) * last.to(tl.float64)
        edge = _threshold(
            logits_ptr, penalised_ptr, columns, vocab_size, penalty, largest, scale, low,
            top_p * total, True, BLOCK, UNROLL,
        )  # fmt: skip
        least = tl.maximum(least, weigh(edge, largest, scale))

    total = sum_weights(
        logits_ptr, penalised_ptr, columns, vocab_size, penalty, largest, scale, least, BLOCK, UNROLL
    )
    target = uniform * total
    before = tl.full((), 0.0, tl.float64)
    start = -1  # of the block that passes the target
    for group in range(0, vocab_size, UNROLL * BLOCK):
        blocks = fetch(logits_ptr, group, columns, BLOCK, UNROLL)
        for i in tl.static_range(UNROLL):
            begin = group + i * BLOCK
            x = prepare(blocks[i], penalised_ptr, begin, columns, vocab_size, penalty, BLOCK)
            w = weigh(x, largest, scale)
            after = before + tl.sum(tl.where(w >= least, w, 0.0).to(tl.float64), axis=0)
            start = tl.where((start < 0) & (after > target), begin, start)
            before = tl.where(start < 0, after, before)
    block = fetch(logits_ptr, start, columns, BLOCK, 1)
    x = prepare(block[0], penalised_ptr, start, columns, vocab_size, penalty, BLOCK)
    w = weigh(x, largest, scale)
    cumulative = before + tl.cumsum(tl.where(w >= least, w, 0.0).to(tl.float64), axis=0)
    kept = (w >= least) & (w > 0)
    token = tl.min(tl.where(kept & (cumulative > target), start + lane, NONE), axis=0)
    # Blocks and lanes add up in different orders, so that a target on the last boundary may lie beyond.
    return tl.where(token == NONE, tl.max(tl.where(kept, start + lane, 0), axis=0), token)
