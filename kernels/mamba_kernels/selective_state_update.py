"""One token of the selective state space recurrence, in place: the decoding step of Mamba-1 and Mamba-2.

    h = decay * h + gain * B * x        y = C h + D x        out = y * silu(z)

with delta = softplus(dt + dt_bias), or dt + dt_bias; the decay and the gain follow from delta and A by one
of the rules in `discretization`'s table.
"""

import torch
import torch.nn.functional as F

from mamba_kernels.backend import backend_for, use_backend
from mamba_kernels.checks import check, check_device, check_rank, check_shape
from mamba_kernels.discretization import DISCRETIZATIONS, discretize


def selective_state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: torch.Tensor | None = None,
    *,
    deltaA: torch.Tensor | None = None,
    discretization: str = "mamba",
) -> torch.Tensor:
    """Advance `state` by one token, in place, and return the output of that token.

    Args:
        state: (slots, nheads, dim, dstate), or (slots, dim, dstate) for one head without its axis, as in
            Mamba-1; then every other `nheads` axis is absent too. float32, bfloat16 or float16; the
            arithmetic is float32, and the output uses the state before it is rounded.
        x, dt: (batch, nheads, dim). Axes of A, dt, dt_bias and deltaA that are broadcast with stride 0
            over dim (and dstate) are recognised and cost nothing, as Mamba-2 ties them.
        A: (nheads, dim, dstate), real.
        B, C: (batch, ngroups, dstate), or (batch, dstate) for one group. Head h uses group
            h // (nheads // ngroups).
        D, dt_bias: (nheads, dim). z, deltaA: as x.
        state_batch_indices: (batch,) integers, the slot of `state` that each row of the batch advances;
            default row b has slot b. No slot may appear twice. A negative slot is padding: its output
            is zero and no state changes.
        deltaA: a second step that replaces delta in the decay only, as it is (asynchronous input: the state
            decays over the time since the last event, whatever the step of the event itself).
        discretization: "mamba", "zoh", "bilinear" or "dirac", each as in selective_scan_fn, which steps
            continue. (lrnnx's own update decays by exp(a) under "bilinear", unlike its scan.)

    Returns:
        (batch, nheads, dim), or (batch, dim) without heads, in x's dtype. There is no gradient.

    Raises:
        ValueError: a shape, a device or the discretization is not as said above.
    """
    check_rank("state", state, 3, 4)
    has_heads = state.dim() == 4
    check_rank("x", x, state.dim() - 1)
    if not has_heads:
        state, A, x, dt = state.unsqueeze(1), A.unsqueeze(0), x.unsqueeze(1), dt.unsqueeze(1)
        D, dt_bias = (None if t is None else t.unsqueeze(0) for t in (D, dt_bias))
        z, deltaA = (None if t is None else t.unsqueeze(1) for t in (z, deltaA))
    B, C = (t.unsqueeze(1) if t.dim() == 2 else t for t in (B, C))
    _check_arguments(state, x, dt, A, B, C, D, z, dt_bias, state_batch_indices, deltaA, discretization)
    args = (state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices, deltaA, discretization)
    if backend_for(x.device) == "triton":
        from mamba_kernels.selective_state_update_triton import launch

        check(state.dtype != torch.float64, "state", "float32, bfloat16 or float16", state.dtype)
        out = launch(*args)
    else:
        out = _update(*args)
    return out if has_heads else out.squeeze(1)


def selective_state_update_ref(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: torch.Tensor | None = None,
    *,
    deltaA: torch.Tensor | None = None,
    discretization: str = "mamba",
) -> torch.Tensor:
    """`selective_state_update` in plain torch on any device; float64 throughout where an input is float64."""
    with use_backend("torch"):
        return selective_state_update(
            state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices,
            deltaA=deltaA, discretization=discretization,
        )  # fmt: skip


def _check_arguments(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    slots: torch.Tensor | None,
    deltaA: torch.Tensor | None,
    discretization: str,
) -> None:
    """Raise ValueError unless the arguments, all with a head axis, fit each other."""
    _, nheads, dim, d_state = state.shape
    batch, ngroups = x.shape[0], B.shape[1]
    check_rank("B", B, 3)
    check(discretization in DISCRETIZATIONS, "discretization", " or ".join(DISCRETIZATIONS), discretization)
    check(not A.is_complex(), "A", "a real tensor", A.dtype)
    check(ngroups > 0 and nheads % ngroups == 0, "B", f"a number of groups that divides {nheads}", ngroups)
    check_shape("x", x, (batch, nheads, dim))
    for name, tensor in (("dt", dt), ("z", z), ("deltaA", deltaA)):
        check_shape(name, tensor, (batch, nheads, dim))
    check_shape("A", A, (nheads, dim, d_state))
    for name, tensor in (("B", B), ("C", C)):
        check_shape(name, tensor, (batch, ngroups, d_state))
    for name, tensor in (("D", D), ("dt_bias", dt_bias)):
        check_shape(name, tensor, (nheads, dim))
    check_device(
        state.device, x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias, deltaA=deltaA,
        state_batch_indices=slots,
    )  # fmt: skip
    if slots is None:
        check(batch == state.shape[0], "x", f"a batch of {state.shape[0]}, the slots of state", batch)
    else:
        check_shape("state_batch_indices", slots, (batch,))
        check(
            not slots.is_floating_point() and slots.is_contiguous(),
            "state_batch_indices", "contiguous integers", f"{slots.dtype}, strides {slots.stride()}",
        )  # fmt: skip


def _update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    dt_softplus: bool,
    slots: torch.Tensor | None,
    deltaA: torch.Tensor | None,
    discretization: str,
) -> torch.Tensor:
    """The equation of the module's docstring, on tensors with a head axis."""
    given = [t for t in (state, x, dt, A, B, C, D, z, dt_bias, deltaA) if t is not None]
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in given) else torch.float32

    def wide(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype)

    heads_per_group = x.shape[1] // B.shape[1]
    B, C = (wide(t).repeat_interleave(heads_per_group, dim=1)[:, :, None, :] for t in (B, C))
    delta = wide(dt) if dt_bias is None else wide(dt) + wide(dt_bias)
    delta = (F.softplus(delta) if dt_softplus else delta)[..., None]
    deltaA = None if deltaA is None else wide(deltaA)[..., None]
    decay, gain = discretize(delta, deltaA, wide(A), discretization)

    if slots is None:
        old = state
    else:
        real = slots >= 0
        old = state[slots.clamp(min=0).long()]
    new = wide(old) * decay + gain * B * wide(x)[..., None]
    y = (new * C).sum(-1)
    if D is not None:
        y = y + wide(D) * wide(x)
    if z is not None:
        y = y * F.silu(wide(z))
    if slots is None:
        state.copy_(new)
    else:
        state[slots[real].long()] = new[real].to(state.dtype)
        y = torch.where(real[:, None, None], y, 0.0)
    return y.to(x.dtype)
