"""The selective scan of Mamba-1: a diagonal state space whose step, B and C may change at every token.

    h[t] = decay[t] * h[t-1] + gain[t] * B[t] * u[t]        per channel and state; h[-1] = initial_state
    y[t] = sum over the states of C[t] * h[t], twice its real part where A is complex
    out  = (y + D * u) * silu(z)

with delta = softplus(delta + delta_bias), and decay and gain from delta, A and, where given, deltaA by
one of four rules: see `discretization`. Source: Mamba, https://arxiv.org/abs/2312.00752, algorithm 2.
Names, layouts and argument order are those of mamba_ssm, and of lrnnx for deltaA and discretization.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from mamba_kernels.backend import backend_for, use_backend
from mamba_kernels.checks import check, check_device, check_rank, check_shape
from mamba_kernels.discretization import DISCRETIZATIONS, discretize


class ScanInputs(NamedTuple):
    """What a scan reads, checked: B and C are (dim, d_state) or (batch, groups, d_state, seqlen).

    Where A is complex, a B or C with a time axis holds real and imaginary parts alternately on it.
    """

    u: torch.Tensor
    delta: torch.Tensor
    A: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    D: torch.Tensor | None
    z: torch.Tensor | None
    delta_bias: torch.Tensor | None
    deltaA: torch.Tensor | None
    initial_state: torch.Tensor | None
    delta_softplus: bool
    discretization: str

    def given(self) -> dict[str, torch.Tensor]:
        """The tensors that a token's output depends on directly, by name."""
        return {
            name: value
            for name, value in self._asdict().items()
            if isinstance(value, torch.Tensor) and name != "initial_state"
        }

    def wide(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the arithmetic for a tensor of `dtype`: float64 where u is, else float32."""
        real = torch.float64 if self.u.dtype == torch.float64 else torch.float32
        return real.to_complex() if dtype.is_complex else real

    def groups(self) -> int:
        """How many groups of channels share their B and C."""
        return max(t.shape[1] if t.dim() == 4 else 1 for t in (self.B, self.C))

    def start_state(self) -> torch.Tensor:
        """The initial state (batch, dim, d_state), or zeros, in the dtype of the arithmetic."""
        dtype = self.wide(self.A.dtype)
        if self.initial_state is not None:
            return self.initial_state.to(dtype)
        return self.A.new_zeros((self.u.shape[0], *self.A.shape), dtype=dtype)


def selective_scan_fn(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    deltaA: torch.Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    discretization: str = "mamba",
    initial_state: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Scan whole sequences; differentiable, once, in every tensor, and through the last state too.

    Args:
        u, delta, z, deltaA: (batch, dim, seqlen), real, of any strides. deltaA is used as it is: neither
            delta_bias nor softplus applies to it.
        A: (dim, d_state), real or complex; the state has its kind.
        B, C: (dim, d_state), the same at every token; or (batch, d_state, seqlen); or
            (batch, groups, d_state, seqlen), where dim / groups channels in a row share a group. Where A is
            complex, those with a time axis are real with (real, imaginary) pairs on it, 2 * seqlen long.
        D, delta_bias: (dim,).
        delta_softplus: apply softplus to delta + delta_bias.
        return_last_state: return (out, last_state), not out alone.
        discretization: "mamba", "zoh", "bilinear" or "dirac".
        initial_state: (batch, dim, d_state): what a scan of the tokens before returned as last_state.

    Returns:
        out, (batch, dim, seqlen) in u's dtype and layout; and last_state (batch, dim, d_state), float32,
        or complex64 where A is complex. The arithmetic is float32; where u is float64 it is float64, on
        torch operations. All results are the same in every run.

    Raises:
        ValueError: a shape, dtype or device is not as said above; the message names the argument.
    """
    inputs = checked(
        u, delta, A, B, C, D, z, delta_bias, deltaA, initial_state, delta_softplus, discretization
    )
    tensors = [t for t in inputs if isinstance(t, torch.Tensor)]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        out, last_state = _SelectiveScan.apply(*inputs)
    else:
        out, last_state, _ = scan_forward(inputs, save_starts=False)
    return (out, last_state) if return_last_state else out


def selective_scan_ref(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    deltaA: torch.Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    discretization: str = "mamba",
    initial_state: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """selective_scan_fn as the equation reads, a step for each token; autograd differentiates it."""
    inputs = checked(
        u, delta, A, B, C, D, z, delta_bias, deltaA, initial_state, delta_softplus, discretization
    )
    wide = {name: tensor.to(inputs.wide(tensor.dtype)) for name, tensor in inputs.given().items()}
    state = inputs.start_state()
    inputs = inputs._replace(**wide)
    seqlen = u.shape[2]

    def by_channel(tensor: torch.Tensor) -> torch.Tensor:
        """B or C as (batch or 1, dim, d_state, seqlen)."""
        if tensor.dim() == 2:
            return tensor[None, :, :, None].expand(-1, -1, -1, seqlen)
        if inputs.A.is_complex():
            tensor = torch.view_as_complex(tensor.unflatten(-1, (seqlen, 2)).contiguous())
        return tensor.repeat_interleave(u.shape[1] // tensor.shape[1], dim=1)

    delta = inputs.delta
    if delta_bias is not None:
        delta = delta + inputs.delta_bias[:, None]
    if delta_softplus:
        delta = F.softplus(delta)
    deltaA = None if deltaA is None else inputs.deltaA[:, :, None]
    decay, gain = discretize(delta[:, :, None], deltaA, inputs.A[:, :, None], discretization)
    drive = gain * by_channel(inputs.B) * inputs.u[:, :, None]
    C = by_channel(inputs.C)
    rows = []
    for t in range(seqlen):
        state = decay[..., t] * state + drive[..., t]
        rows.append((C[..., t] * state).sum(-1))
    y = torch.stack(rows, dim=-1)
    if y.is_complex():
        y = 2 * y.real
    if D is not None:
        y = y + inputs.D[:, None] * inputs.u
    if z is not None:
        y = y * F.silu(inputs.z)
    y = y.to(u.dtype)
    return (y, state) if return_last_state else y


class _SelectiveScan(torch.autograd.Function):
    """(out, last_state) of ScanInputs; the states are computed again in the backward pass, not kept."""

    @staticmethod
    def forward(ctx: Any, *values: Any) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = ScanInputs(*values)
        out, last_state, starts = scan_forward(inputs, save_starts=True)
        ctx.save_for_backward(*inputs[:-2], starts)
        ctx.options = inputs[-2:]
        ctx.backend = _backend(inputs)
        ctx.set_materialize_grads(False)
        return out, last_state

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dout: torch.Tensor | None, dlast_state: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        *tensors, starts = ctx.saved_tensors
        inputs = ScanInputs(*tensors, *ctx.options)
        if dout is None:
            dout = torch.zeros_like(inputs.u)
        with use_backend(ctx.backend):  # autograd's threads do not see the caller's choice
            grads, _ = scan_backward(inputs, starts, dout, dlast_state)
        return tuple(grads.get(name) for name in ScanInputs._fields)


def scan_forward(
    inputs: ScanInputs, save_starts: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return (out, last_state, starts) without autograd.

    starts, the states at regular distances, is what `scan_backward` on the same backend needs; None
    unless save_starts.
    """
    if _backend(inputs) == "torch":
        from mamba_kernels import selective_scan_torch as implementation
    else:
        from mamba_kernels import selective_scan_triton as implementation
    with torch.no_grad(), torch.autocast(inputs.u.device.type, enabled=False):
        return implementation.scan_forward(inputs, save_starts)


def scan_backward(
    inputs: ScanInputs,
    starts: torch.Tensor,
    dout: torch.Tensor,
    dlast_state: torch.Tensor | None,
    save_out: bool = False,
) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
    """Return the gradients of the tensors given, by name and in their dtypes; with save_out also out."""
    if _backend(inputs) == "torch":
        from mamba_kernels import selective_scan_torch as implementation
    else:
        from mamba_kernels import selective_scan_bwd_triton as implementation
    with torch.autocast(inputs.u.device.type, enabled=False):
        grads, out = implementation.scan_backward(inputs, starts, dout, dlast_state, save_out)
    return {name: grad.to(getattr(inputs, name).dtype) for name, grad in grads.items()}, out


def _backend(inputs: ScanInputs) -> str:
    """The kernels compute in float32, so float64 runs on torch operations."""
    if inputs.u.dtype == torch.float64 or inputs.u.numel() == 0:
        return "torch"
    return backend_for(inputs.u.device)


def checked(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    delta_bias: torch.Tensor | None,
    deltaA: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    delta_softplus: bool,
    discretization: str,
) -> ScanInputs:
    """Raise ValueError unless the arguments fit each other; B and C with a time axis get as many groups."""
    check(discretization in DISCRETIZATIONS, "discretization", " or ".join(DISCRETIZATIONS), discretization)
    if deltaA is not None and not isinstance(deltaA, torch.Tensor):
        raise ValueError(f"deltaA: expected a tensor or None, got {deltaA!r}; delta_softplus comes after it")
    check_rank("u", u, 3)
    batch, dim, seqlen = u.shape
    check(seqlen > 0, "u", "at least one token", tuple(u.shape))
    for name, tensor in (("u", u), ("delta", delta), ("z", z), ("deltaA", deltaA)):
        check_shape(name, tensor, (batch, dim, seqlen))
        if tensor is not None:
            check(tensor.is_floating_point(), name, "real floating point", tensor.dtype)
    check_rank("A", A, 2)
    check_shape("A", A, (dim, A.shape[1]))
    check_shape("D", D, (dim,))
    check_shape("delta_bias", delta_bias, (dim,))
    check_shape("initial_state", initial_state, (batch, *A.shape))
    check_device(
        u.device, delta=delta, A=A, B=B, C=C, D=D, z=z, delta_bias=delta_bias, deltaA=deltaA,
        initial_state=initial_state,
    )  # fmt: skip
    B, C = _checked_projection("B", B, u, A), _checked_projection("C", C, u, A)
    if B.dim() == C.dim() == 4 and B.shape[1] != C.shape[1]:
        check(1 in (B.shape[1], C.shape[1]), "C", f"{B.shape[1]} groups, as B, or one", C.shape[1])
        groups = max(B.shape[1], C.shape[1])
        B, C = B.expand(-1, groups, -1, -1), C.expand(-1, groups, -1, -1)
    return ScanInputs(
        u, delta, A, B, C, D, z, delta_bias, deltaA, initial_state, delta_softplus, discretization
    )


def _checked_projection(name: str, tensor: torch.Tensor, u: torch.Tensor, A: torch.Tensor) -> torch.Tensor:
    """Check B or C and return it as ScanInputs holds it."""
    batch, dim, seqlen = u.shape
    check_rank(name, tensor, 2, 3, 4)
    if tensor.dim() == 2:
        check_shape(name, tensor, A.shape)
        check(A.is_complex() or not tensor.is_complex(), name, "real, as A is", tensor.dtype)
        return tensor.to(A.dtype) if A.is_complex() else tensor
    if tensor.dim() == 3:
        tensor = tensor.unsqueeze(1)
    groups = tensor.shape[1]
    width = 2 if A.is_complex() else 1
    check_shape(name, tensor, (batch, groups, A.shape[1], width * seqlen))
    check(tensor.is_floating_point(), name, "real (complex values as pairs of reals)", tensor.dtype)
    check(groups > 0 and dim % groups == 0, name, f"a number of groups that divides {dim}", groups)
    return tensor
