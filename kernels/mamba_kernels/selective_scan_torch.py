"""The selective scan in torch operations, parallel over time: what runs on the CPU.

The sequence is cut into segments, one after another, so that memory does not grow with its length. In
a segment several groups of STEPS tokens advance side by side from a zero state, a step at a time; then
each group's own start state is added, carried through the product of its decays. Only products of decays
appear, never a quotient or the exponential of a sum, so nothing overflows that the recurrence does not.

Tensors are token-major with channels last, (batch, tokens, groups of B and C, d_state, channels of one
group): the axis that vectorises is the long one, and one token's states lie together.

The backward pass goes through the segments in reverse and computes each again from its start state.

Measured for 512 tokens, d_inner 1536, d_state 16 on one core (AVX-512), in CPU time: 24.7 ms, of which 3.5 ms
are exp2 (exp would take 9 ms more); other sizes than STEPS of 8 and SEGMENT of 32, from 4 x 4 to 32 x 1, take
24.1 to 29.6 ms.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from mamba_kernels.discretization import discretize
from mamba_kernels.selective_scan import ScanInputs

STEPS = 8
SEGMENT = 4 * STEPS


def scan_forward(
    inputs: ScanInputs, save_starts: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return (out, last_state, starts); starts, the state before each segment, is for scan_backward."""
    out = torch.empty_like(inputs.u)
    state = inputs.start_state()
    # Two buffers for all segments: fresh ones would cost more in page faults than in arithmetic.
    workspace = torch.empty(2, *_segment_shape(inputs), device=out.device, dtype=state.dtype)
    starts = []
    for first in range(0, inputs.u.shape[2], SEGMENT):
        if save_starts:
            starts.append(state)
        piece = {name: _tokens(inputs, name, tensor, first) for name, tensor in inputs.given().items()}
        y, state = _scan_segment(inputs._replace(**piece), state, workspace)
        out[..., first : first + SEGMENT] = y
    return out, state.contiguous(), torch.stack(starts) if save_starts else None


def scan_backward(
    inputs: ScanInputs,
    starts: torch.Tensor,
    dout: torch.Tensor,
    dlast_state: torch.Tensor | None,
    save_out: bool,
) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
    """Return the gradient of each tensor given, by name, in the dtype of the arithmetic; and out."""
    given = inputs.given()
    grads = {name: torch.zeros_like(t, dtype=inputs.wide(t.dtype)) for name, t in given.items()}
    out = torch.empty_like(inputs.u) if save_out else None
    dstate = torch.zeros_like(starts[0]) if dlast_state is None else dlast_state
    for first in reversed(range(0, inputs.u.shape[2], SEGMENT)):
        piece = {
            name: _tokens(inputs, name, tensor, first).detach().requires_grad_()
            for name, tensor in given.items()
        }
        start = starts[first // SEGMENT].requires_grad_()
        with torch.enable_grad():
            y, state = _scan_segment(inputs._replace(**piece), start)
        *dpiece, dstate = torch.autograd.grad(
            (y, state),
            (*piece.values(), start),
            (dout[..., first : first + SEGMENT].to(y.dtype), dstate),
            materialize_grads=True,
        )
        if save_out:
            out[..., first : first + SEGMENT] = y.detach()
        for name, grad in zip(piece, dpiece, strict=True):
            _tokens(inputs, name, grads[name], first).add_(grad)
    if inputs.initial_state is not None:
        grads["initial_state"] = dstate
    return grads, out


def _tokens(inputs: ScanInputs, name: str, tensor: torch.Tensor, first: int) -> torch.Tensor:
    """A segment's part of one of the tensors, in the dtype of the arithmetic; the whole of a constant."""
    last = first + SEGMENT
    if name in ("B", "C") and tensor.dim() == 4:
        width = 2 if inputs.A.is_complex() else 1  # real and imaginary parts alternate
        tensor = tensor[..., width * first : width * last]
    elif name in ("u", "delta", "z", "deltaA"):
        tensor = tensor[..., first:last]
    return tensor.to(inputs.wide(tensor.dtype))


def _segment_shape(inputs: ScanInputs) -> tuple[int, ...]:
    """The shape of a segment's states."""
    batch, dim, seqlen = inputs.u.shape
    groups = inputs.groups()
    return batch, min(SEGMENT, seqlen), groups, inputs.A.shape[1], dim // groups


def _scan_segment(
    piece: ScanInputs, start: torch.Tensor, workspace: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scan one segment from the state `start`; returns y (batch, dim, tokens) and the last state.

    workspace: room for two tensors of the states' shape, if there is no autograd.
    """
    is_complex = piece.A.is_complex()
    groups = piece.groups()
    tokens = piece.u.shape[2]
    decay_out, drive_out = (None, None) if workspace is None else workspace[:, :, :tokens]

    def by_token(tensor: torch.Tensor) -> torch.Tensor:  # (batch, dim, tokens)
        return tensor.transpose(1, 2).unflatten(-1, (groups, 1, -1))

    def by_state(tensor: torch.Tensor) -> torch.Tensor:  # (..., dim, d_state)
        return tensor.unflatten(-2, (groups, -1)).transpose(-1, -2).contiguous()

    def varying(tensor: torch.Tensor) -> torch.Tensor:  # (batch, groups, d_state, tokens)
        if is_complex:
            tensor = torch.view_as_complex(tensor.unflatten(-1, (-1, 2)).contiguous())
        return tensor.movedim(-1, 1)[..., None]

    delta = piece.delta
    if piece.delta_bias is not None:
        delta = delta + piece.delta_bias[:, None]
    if piece.delta_softplus:
        delta = F.softplus(delta)
    deltaA = None if piece.deltaA is None else by_token(piece.deltaA)
    A = by_state(piece.A)
    decay, gain = discretize(by_token(delta), deltaA, A, piece.discretization, out=decay_out)
    B = varying(piece.B) if piece.B.dim() == 4 else by_state(piece.B)
    drive = torch.mul(gain * by_token(piece.u), B, out=drive_out)

    states = linear_scan(decay, drive, by_state(start))
    if piece.C.dim() == 4:
        y = varying(piece.C).transpose(-1, -2) @ states
    else:
        y = (by_state(piece.C) * states).sum(-2, keepdim=True)
    if is_complex:
        y = 2 * y.real
    y = y.flatten(2).transpose(1, 2)
    if piece.D is not None:
        y = y + piece.D[:, None] * piece.u
    if piece.z is not None:
        y = y * F.silu(piece.z)
    # A copy: the next segment reuses the workspace.
    return y, states[:, -1].transpose(-1, -2).clone().flatten(1, 2)


def linear_scan(decay: torch.Tensor, drive: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """states[:, t] = decay[:, t] * states[:, t - 1] + drive[:, t], and start before t = 0.

    decay, drive: (batch, tokens, ...), of one shape; they may be overwritten. start: (batch, ...).
    """
    if torch.is_grad_enabled():
        return _LinearScan.apply(decay, drive, start)
    _scan_in_place(decay, drive, start)
    return drive


class _LinearScan(torch.autograd.Function):
    """linear_scan, which leaves its arguments alone. Its adjoint is the same scan from the end."""

    @staticmethod
    def forward(ctx: Any, decay: torch.Tensor, drive: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        states = drive.clone()
        _scan_in_place(decay.clone(), states, start)
        ctx.save_for_backward(decay, states, start)
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dstates: torch.Tensor) -> tuple[torch.Tensor, ...]:
        decay, states, start = ctx.saved_tensors
        decay = decay.conj().resolve_conj()
        adjoint = dstates.flip(1)
        decay_after = torch.cat([torch.zeros_like(decay[:, :1]), decay[:, 1:].flip(1)], dim=1)
        _scan_in_place(decay_after, adjoint, torch.zeros_like(start))
        adjoint = adjoint.flip(1)
        before = torch.cat([start[:, None], states[:, :-1]], dim=1)
        return adjoint * before.conj(), adjoint, decay[:, 0] * adjoint[:, 0]


def _scan_in_place(decay: torch.Tensor, drive: torch.Tensor, start: torch.Tensor) -> None:
    """Turn `drive` into the states of linear_scan, and `decay` into products of decays."""
    tokens = drive.shape[1]
    whole = tokens - tokens % STEPS
    if whole:
        _scan_groups(*(x[:, :whole].unflatten(1, (-1, STEPS)) for x in (decay, drive)), start)
        start = drive[:, whole - 1]
    if whole < tokens:
        _scan_groups(*(x[:, whole:].unsqueeze(1) for x in (decay, drive)), start)


def _scan_groups(decay: torch.Tensor, drive: torch.Tensor, start: torch.Tensor) -> None:
    """The same for tensors (batch, groups of tokens, tokens of one group, ...)."""
    for step in range(1, drive.shape[2]):
        drive[:, :, step].addcmul_(decay[:, :, step], drive[:, :, step - 1])
        decay[:, :, step].mul_(decay[:, :, step - 1])
    starts = [start]
    for group in range(drive.shape[1] - 1):
        starts.append(torch.addcmul(drive[:, group, -1], decay[:, group, -1], starts[-1]))
    drive.addcmul_(decay, torch.stack(starts, dim=1)[:, :, None])
