"""The SSD operation of Mamba-2 (Dao and Gu 2024, "Transformers are SSMs", section 6).

For each head, with a state h (headdim, d_state), a scalar A and step sizes dt:

    h[t] = exp(dt[t] A) h[t-1] + dt[t] x[t] B[t]^T
    y[t] = h[t] C[t] + D x[t],   then  y[t] * silu(z[t])  where z is given

Computed in chunks by matrix products. How long the chunks are is the implementation's choice and not
part of the function.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from mamba_kernels.backend import backend_for
from mamba_kernels.checks import check, check_device, check_rank, check_shape
from mamba_kernels.chunk_scan_torch import (
    mamba_chunk_scan_combined_ref,
    number_runs,
    scan_sequences,
    ssd_chunked,
    ssd_recurrent_ref,
)

__all__ = ["mamba_chunk_scan_combined", "mamba_chunk_scan_combined_ref", "ssd_recurrent_ref"]


def mamba_chunk_scan_combined(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
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
    """Scan whole sequences; names, order and layouts as in mamba_ssm.

    Args:
        x: (batch, seqlen, nheads, headdim), float32, bfloat16 or float16 (float64 in torch only).
        dt: (batch, seqlen, nheads). The step is clamp(softplus(dt + dt_bias), *dt_limit), in float32.
        A: (nheads,), negative, float32.
        B, C: (batch, seqlen, ngroups, d_state); head h reads group h // (nheads // ngroups).
        chunk_size: accepted and checked, without effect.
        D: (nheads,) or (nheads, headdim).
        z: as x.
        dt_bias: (nheads,).
        initial_states: (batch, nheads, headdim, d_state), zeros if None. With cu_seqlens also
            (num_sequences, ...), one a sequence; (1, ...) is the first sequence's.
        seq_idx: (batch, seqlen) integers; the state is zeroed wherever the id changes from one token to
            the next, so the initial state belongs to the sequence of the first token.
        cu_seqlens: (num_sequences + 1,) integers, bounds of the sequences packed into a batch of one,
            each scanned by itself; it stands in place of seq_idx. Tokens outside every sequence give 0.
        return_final_states: also return the last state, (batch, nheads, headdim, d_state).
        return_varlen_states: also return the last state of each sequence of cu_seqlens,
            (num_sequences, nheads, headdim, d_state).

    Returns y as x, and the states asked for, in float32, in the order final, varlen. Differentiable in
    every floating-point argument. The activations may be views of any strides; none is copied.

    Raises ValueError naming the argument whose shape, dtype or device does not fit.
    """
    _check_arguments(x, dt, A, B, C, chunk_size, D, z, dt_bias, initial_states, seq_idx, cu_seqlens)
    check(not return_varlen_states or cu_seqlens is not None, "cu_seqlens", "bounds of sequences", None)
    if cu_seqlens is not None:
        seq_idx = None
    tensors = (x, dt, A, B, C, D, z, dt_bias, initial_states)
    if backend_for(x.device) == "torch":
        options: dict[str, Any] = dict(D=D, z=z, dt_bias=dt_bias, initial_states=initial_states)
        options.update(seq_idx=seq_idx, cu_seqlens=cu_seqlens, dt_softplus=dt_softplus, dt_limit=dt_limit)
        options.update(return_final_states=return_final_states, return_varlen_states=return_varlen_states)
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
            return mamba_chunk_scan_combined_ref(x, dt, A, B, C, 64, **options)
        return scan_sequences(ssd_chunked, x, dt, A, B, C, **options)
    check(x.dtype != torch.float64, "x", "float32, bfloat16 or float16 on the Triton backend", x.dtype)
    y, states = _ChunkScan.apply(*tensors, number_runs(seq_idx), cu_seqlens, dt_softplus, dt_limit)
    results = [y]
    if return_final_states:
        results.append(states if cu_seqlens is None else states[-1:])
    if return_varlen_states:
        results.append(states)
    return results[0] if len(results) == 1 else tuple(results)


def _check_arguments(x, dt, A, B, C, chunk_size, D, z, dt_bias, initial_states, seq_idx, cu_seqlens) -> None:
    check_rank("x", x, 4)
    check_rank("B", B, 4)
    batch, seqlen, nheads, headdim = x.shape
    ngroups, d_state = B.shape[2:]
    check(chunk_size > 0, "chunk_size", "a positive number", chunk_size)
    check(x.is_floating_point(), "x", "a floating-point dtype", x.dtype)
    check_shape("dt", dt, (batch, seqlen, nheads))
    check_shape("A", A, (nheads,))
    check(ngroups > 0 and nheads % ngroups == 0, "B", f"ngroups that divides {nheads} heads", ngroups)
    check_shape("B", B, (batch, seqlen, ngroups, d_state))
    check_shape("C", C, (batch, seqlen, ngroups, d_state))
    if D is not None:
        check_shape("D", D, (nheads, headdim) if D.dim() == 2 else (nheads,))
    check_shape("z", z, x.shape)
    check_shape("dt_bias", dt_bias, (nheads,))
    check_shape("seq_idx", seq_idx, (batch, seqlen))
    rows = batch
    if cu_seqlens is not None:
        check_rank("cu_seqlens", cu_seqlens, 1)
        check(batch == 1, "cu_seqlens", "None for a batch of more than one", f"batch {batch}")
        check(cu_seqlens.numel() > 1, "cu_seqlens", "at least 2 bounds", cu_seqlens.numel())
        rows = cu_seqlens.numel() - 1
    if initial_states is not None:
        check_rank("initial_states", initial_states, 4)
        if cu_seqlens is not None and initial_states.shape[0] == 1:
            rows = 1
        check_shape("initial_states", initial_states, (rows, nheads, headdim, d_state))
    check_device(
        x.device, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias, initial_states=initial_states,
        seq_idx=seq_idx, cu_seqlens=cu_seqlens,
    )  # fmt: skip


class _ChunkScan(torch.autograd.Function):
    """(y, last state of each row); a row is an entry of the batch, or a sequence of cu_seqlens."""

    @staticmethod
    def forward(
        ctx, x, dt, A, B, C, D, z, dt_bias, initial_states, runs, cu_seqlens, dt_softplus, dt_limit
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from mamba_kernels.chunk_scan_fwd_triton import launch_forward

        A = A.contiguous()
        dt_bias = dt_bias.contiguous() if dt_bias is not None else None
        ctx.save_for_backward(x, dt, A, B, C, D, z, dt_bias, initial_states, runs, cu_seqlens)
        ctx.dt_softplus, ctx.dt_limit = dt_softplus, dt_limit
        ctx.set_materialize_grads(False)
        rows = x.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
        start = _row_states(initial_states, rows)
        with torch.cuda.device_of(x):
            return launch_forward(
                x, dt, A, B, C, D, z, dt_bias, start, runs, cu_seqlens, dt_softplus, dt_limit
            )

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: torch.Tensor | None, dlast: torch.Tensor | None) -> tuple:
        from mamba_kernels.chunk_scan_bwd_triton import launch_backward

        *tensors, initial_states, runs, cu_seqlens = ctx.saved_tensors
        x = tensors[0]
        start = _row_states(initial_states, x.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1)
        dout = torch.zeros_like(x) if dout is None else dout
        dlast = None if dlast is None else dlast.contiguous()
        with torch.cuda.device_of(x):
            *gradients, dstart = launch_backward(
                dout, dlast, *tensors, start, runs, cu_seqlens, ctx.dt_softplus, ctx.dt_limit
            )
        if initial_states is not None:
            gradients.append(dstart[: initial_states.shape[0]].to(initial_states.dtype))
        else:
            gradients.append(None)
        return (*gradients, None, None, None, None)


def _row_states(initial_states: torch.Tensor | None, rows: int) -> torch.Tensor | None:
    """One contiguous float32 state a row; one state for several packed rows is the first row's."""
    if initial_states is None or initial_states.shape[0] == rows:
        return None if initial_states is None else initial_states.float().contiguous()
    states = initial_states.new_zeros(rows, *initial_states.shape[1:], dtype=torch.float32)
    states[:1] = initial_states
    return states
