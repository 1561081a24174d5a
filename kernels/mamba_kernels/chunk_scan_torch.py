"""The SSD scan of Mamba-2 in torch: the recurrence, its chunked form, and the form the CPU runs.

All three compute h[t] = exp(dt[t] A) h[t-1] + dt[t] x[t] B[t]^T and y[t] = h[t] C[t] + D x[t]
(Dao and Gu 2024, equation 1 with scalar A). The chunked forms are section 6 of the paper: with
a = cumsum(dt A) inside a chunk and H the state that enters it,

    y[i]   = exp(a[i]) H C[i] + sum over j <= i of exp(a[i] - a[j]) dt[j] (C[i] . B[j]) x[j] + D x[i]
    H_next = exp(a[last]) H   + sum over j of exp(a[last] - a[j]) dt[j] x[j] B[j]^T

Every exponent is at most 0 for A <= 0. Shapes are those of `chunk_scan.mamba_chunk_scan_combined`.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F

# The core of a scan: (x, dt, A, B, C, D, state, runs) -> (y, final state). dt is the step size itself,
# state is in the accumulation dtype, runs (batch, seqlen) numbers the packed sequences or is None.
Core = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def ssd_recurrent_ref(
    x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, **options
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """The recurrence, one token at a time; float64 in, float64 out. Slow, and the oracle of the rest.

    Takes the options of `mamba_chunk_scan_combined` by keyword.
    """
    return scan_sequences(_recurrent, x, dt, A, B, C, **options)


def mamba_chunk_scan_combined_ref(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    **options,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """`mamba_chunk_scan_combined` in torch operations that autograd follows; float64 in, float64 out."""
    return scan_sequences(partial(_chunked, chunk_size=chunk_size), x, dt, A, B, C, **options)


def scan_sequences(
    core: Core,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Everything of the operation but the scan, which `core` does: step sizes, packing, gate, results."""
    batch, _, nheads, headdim = x.shape
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    dt = step_sizes(dt.to(wide), dt_bias, dt_softplus, dt_limit)
    rows = batch if cu_seqlens is None else cu_seqlens.numel() - 1
    if initial_states is None:
        state = x.new_zeros(rows, nheads, headdim, B.shape[-1], dtype=wide)
    else:
        state = initial_states.to(wide)
    if cu_seqlens is None:
        y, state = core(x, dt, A, B, C, D, state, number_runs(seq_idx))
    else:
        # One state for a packed row is that of its first sequence.
        state = F.pad(state, (0, 0) * 3 + (0, rows - state.shape[0]))
        y, states = x.new_zeros(x.shape, dtype=wide), []
        for row, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
            part = (t[:, start:end] for t in (B, C))
            out, last = core(x[:, start:end], dt[:, start:end], A, *part, D, state[row : row + 1], None)
            y[:, start:end] = out
            states.append(last)
        state = torch.cat(states)
    if z is not None:
        y = y * F.silu(z.to(y.dtype))
    results = [y.to(x.dtype)]
    if return_final_states:
        results.append(state if cu_seqlens is None else state[-1:])
    if return_varlen_states:
        results.append(state)
    return results[0] if len(results) == 1 else tuple(results)


def step_sizes(
    dt: torch.Tensor, dt_bias: torch.Tensor | None, dt_softplus: bool, dt_limit: tuple[float, float]
) -> torch.Tensor:
    """clamp(softplus(dt + dt_bias)), each part where it is asked for."""
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = F.softplus(dt)
    return dt if tuple(dt_limit) == (0.0, float("inf")) and dt_softplus else dt.clamp(*dt_limit)


def number_runs(seq_idx: torch.Tensor | None) -> torch.Tensor | None:
    """Number the runs of equal ids in each row, int32: the state is reset wherever the id changes."""
    if seq_idx is None:
        return None
    changes = F.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0))
    return changes.cumsum(1, dtype=torch.int32)


def _recurrent(x, dt, A, B, C, D, state, runs) -> tuple[torch.Tensor, torch.Tensor]:
    batch, seqlen, nheads, headdim = x.shape
    wide = state.dtype
    B, C = (t.to(wide).repeat_interleave(nheads // t.shape[2], 2) for t in (B, C))
    y = []
    for t in range(seqlen):
        decay = (dt[:, t] * A.to(wide)).exp()
        if runs is not None and t:
            decay = decay * (runs[:, t] == runs[:, t - 1])[:, None]
        step = (dt[:, t, :, None] * x[:, t].to(wide))[..., None] * B[:, t, :, None]
        state = decay[..., None, None] * state + step
        y.append((state * C[:, t, :, None]).sum(-1))
    y = torch.stack(y, 1) if y else x.new_zeros(batch, 0, nheads, headdim, dtype=wide)
    return _add_skip(y, x, D), state


def _chunked(x, dt, A, B, C, D, state, runs, chunk_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The equations of the module's head, chunk after chunk; matrix products in x's dtype."""
    seqlen, nheads = x.shape[1:3]
    narrow = torch.promote_types(x.dtype, torch.promote_types(B.dtype, C.dtype))
    y = [state.new_zeros(x.shape[0], 0, *x.shape[2:])]
    for start in range(0, seqlen, chunk_size):
        chunk = slice(start, start + chunk_size)
        xk, dk = x[:, chunk].to(narrow), dt[:, chunk]
        Bk, Ck = (t[:, chunk].to(narrow).repeat_interleave(nheads // t.shape[2], 2) for t in (B, C))
        a = (dk * A.to(dk.dtype)).cumsum(1)
        into, across, onward = a.exp(), a[:, :, None] - a[:, None], (a[:, -1:] - a).exp()
        seen = torch.ones(a.shape[1], a.shape[1], dtype=torch.bool, device=x.device).tril()
        if runs is not None:
            run, before = runs[:, chunk], runs[:, max(start - 1, 0), None]
            seen = seen & (run[:, :, None] == run[:, None])
            into = into * (run == before)[..., None]
            onward = onward * (run == run[:, -1:])[..., None]
        else:
            seen = seen[None]
        within = across.masked_fill(~seen[..., None], float("-inf")).exp() * dk[:, None]
        scores = torch.einsum("bihn,bjhn->bijh", Ck, Bk)
        inner = torch.einsum("bijh,bjhp->bihp", (scores * within).to(narrow), xk)
        outer = torch.einsum("bihn,bhpn->bihp", Ck, state.to(narrow))
        y.append(inner + outer * into[..., None])
        weighted = (xk * (onward * dk)[..., None]).to(narrow)
        state = state * into[:, -1, :, None, None] + torch.einsum("bjhp,bjhn->bhpn", weighted, Bk)
    return _add_skip(torch.cat(y, 1), x, D), state


def _add_skip(y: torch.Tensor, x: torch.Tensor, D: torch.Tensor | None) -> torch.Tensor:
    if D is None:
        return y
    return y + x.to(y.dtype) * (D if D.dim() == 2 else D[:, None]).to(y.dtype)


def ssd_chunked(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    state: torch.Tensor,
    runs: torch.Tensor | None,
    block: int = 64,
    blocks: int = 4,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ssd_chunked_` that leaves the state it is given as it was; returns (y, final state)."""
    state = state.clone(memory_format=torch.contiguous_format)
    return ssd_chunked_(x, dt, A, B, C, D, state, runs, block, blocks), state


def ssd_chunked_(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    state: torch.Tensor,
    runs: torch.Tensor | None,
    block: int = 64,
    blocks: int = 4,
) -> torch.Tensor:
    """The chunked form for a CPU, without autograd: few operations, each over `blocks` chunks at once.

    What it costs beside the matrix products is passes over memory and conversions: torch's operations
    on mixed dtypes convert through temporaries, so each operation here keeps to one dtype; buffers
    hold block * blocks tokens whatever the sequence's length, small enough to stay in the cache and to
    be handed out again by the allocator without page faults.

    block 64 balances the exponentials (block per token and head) against passing the state on (one pass
    a block). y comes in x's dtype; state, contiguous, is advanced in place.
    """
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    for row in range(x.shape[0]):
        previous = runs[row, 0] if runs is not None else None
        for tokens, count in _pieces(x.shape[1], block, blocks):
            pick = tuple(t[row, tokens].unflatten(0, (count, -1)) for t in (x, dt, B, C, y))
            run = runs[row, tokens].view(count, -1) if runs is not None else None
            _scan_blocks(*pick, A, D, state[row], run, previous)
            previous = run[-1, -1] if run is not None else None
    return y


def _pieces(seqlen: int, block: int, blocks: int) -> Iterator[tuple[slice, int]]:
    """Cut seqlen into slices of up to `blocks` whole chunks, then one shorter chunk; with their counts."""
    whole = seqlen // block
    for first in range(0, whole, blocks):
        count = min(blocks, whole - first)
        yield slice(first * block, (first + count) * block), count
    if seqlen % block:
        yield slice(whole * block, seqlen), 1


def _scan_blocks(x, dt, B, C, y, A, D, state, run, previous) -> None:
    """Scan consecutive chunks of one row. Writes y (chunks, q, nheads, headdim), updates state in place.

    x, dt, B, C: (chunks, q, ...); state (nheads, headdim, d_state); run (chunks, q) numbers the packed
    sequences, and `previous` is that of the token before.
    """
    chunks, q, nheads, headdim = x.shape
    ngroups, d_state = B.shape[2:]
    narrow = torch.promote_types(x.dtype, torch.promote_types(B.dtype, C.dtype))
    x, B, C = x.to(narrow), B.to(narrow).transpose(1, 2), C.to(narrow).transpose(1, 2)

    dt = dt.transpose(1, 2).contiguous()  # (chunks, nheads, q), as a, into and onward
    # To base 2: exp2 takes a third of exp's time, and a tenth where the result is below the normal numbers.
    a = (dt * (A.to(dt.dtype) * math.log2(math.e))[:, None]).cumsum(-1)
    into, onward = a.exp2(), (a[..., -1:] - a).exp2_().mul_(dt)
    scores = torch.matmul(C, B.transpose(-1, -2)).to(dt.dtype).tril_()  # (chunks, ngroups, q, q)
    if run is not None:
        before = torch.cat([previous[None], run[:-1, -1]])
        scores.mul_((run[:, :, None] == run[:, None])[:, None])
        into.mul_((run == before[:, None])[:, None])
        onward.mul_((run == run[:, -1:])[:, None])

    # Exponents above the diagonal are cut to 0; the scores there are 0 already. Below, the smallest normal
    # number of float32 stands for all that is smaller.
    weights = (a[..., :, None] - a[..., None, :]).clamp_(-126, 0).exp2_()
    weights.unflatten(1, (ngroups, -1)).mul_(scores[:, :, None])
    weights.mul_(dt[..., None, :])
    if D is not None and D.dim() == 1:
        weights.diagonal(dim1=-2, dim2=-1).add_(D.to(dt.dtype)[:, None])  # D x, for the price of a diagonal
    weights = weights.to(narrow)

    weighted = x * onward.transpose(1, 2).to(narrow)[..., None]
    weighted = weighted.reshape(chunks, q, ngroups, -1).permute(0, 2, 3, 1)
    steps = torch.matmul(weighted, B).view(chunks, nheads, headdim * d_state)
    entering = torch.empty_like(steps)
    flat = state.view(nheads, headdim * d_state)
    step = torch.empty_like(flat)
    for k in range(chunks):
        entering[k].copy_(flat)
        torch.addcmul(step.copy_(steps[k]), flat, into[k, :, -1:], out=flat)

    outer = torch.matmul(C, entering.view(chunks, ngroups, -1, d_state).transpose(-1, -2))
    outer = outer.transpose(1, 2).reshape(x.shape)
    inner = torch.bmm(weights.view(-1, q, q), x.transpose(1, 2).reshape(-1, q, headdim))
    inner = inner.view(chunks, nheads, q, headdim).transpose(1, 2)
    result = y if y.dtype == narrow else torch.empty_like(y, dtype=narrow)
    torch.addcmul(inner, outer, into.transpose(1, 2).to(narrow)[..., None], out=result)
    if D is not None and D.dim() == 2:
        result.addcmul_(x, D.to(narrow))
    if result is not y:
        y.copy_(result)
