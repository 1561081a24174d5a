"""One token of the Mamba-1 recurrence on a packed state: `selective_state_update` beside `packed_state`.

    h = exp(dt A) h + dt x B;   y = C h + D x,   gated by silu(z)

for each channel. Every element of the state decays at a rate of its own, so the window's inputs are read one
after the other, from the stored state on; it is written once in a window.
"""

import torch
import torch.nn.functional as F

from mamba_kernels.backend import backend_for
from mamba_kernels.checks import check, check_device, check_shape
from mamba_kernels.packed_state import PackedState, recur


def packed_selective_update(
    packed: PackedState,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
) -> torch.Tensor:
    """Advance a packed state by one token, in place, and return the output of that token.

    The caller counts the token, once all layers have read it: `packed_state.advance_positions`.

    Args:
        packed: a state of one head with dim rows, and a dt for each row.
        x, dt: (batch, dim). A: (dim, dstate), negative. B, C: (batch, dstate).
        D, dt_bias: (dim,). z: as x.

    Returns:
        (batch, dim), in x's dtype. The arithmetic is float32, or float64 where x is.

    Raises:
        ValueError: a shape or a device is not as said above.
    """
    batch, dim = x.shape
    check_shape("packed.dt", packed.dt, (batch, packed.format.window, dim))
    check_shape("dt", dt, (batch, dim))
    check_shape("A", A, (dim, packed.d_state))
    for name, tensor in (("B", B), ("C", C)):
        check_shape(name, tensor, (batch, packed.d_state))
    for name, tensor, shape in (("D", D, (dim,)), ("z", z, (batch, dim)), ("dt_bias", dt_bias, (dim,))):
        check_shape(name, tensor, shape)
    check(len(packed.format.heads) == 1, "packed", "a state of one head", len(packed.format.heads))
    check_device(x.device, codes=packed.codes, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias)
    if backend_for(x.device) == "triton":
        from mamba_kernels.packed_selective_update_triton import launch_packed_selective_update

        check(x.dtype != torch.float64, "x", "float32, bfloat16 or float16", x.dtype)
        return launch_packed_selective_update(packed, x, dt, A, B, C, D, z, dt_bias, dt_softplus)

    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    dt = dt.to(wide) if dt_bias is None else dt.to(wide) + dt_bias.to(wide)
    dt = F.softplus(dt) if dt_softplus else dt
    A, C = A.to(wide), C.to(wide)

    window = packed.format.window
    slots = torch.arange(batch, device=x.device)
    state = packed.stored(slots).to(wide)
    past_x, past_B, past_dt = packed.window(slots)
    for age in reversed(range(window - 1)):  # window - 1 inputs at most: the token that fills it folds it
        state = recur(state, past_x[:, age], past_B[:, age], past_dt[:, age], A)
    state = recur(state, x[:, None], B[:, None], dt, A)

    full = ((packed.position + 1) % window == 0).nonzero().squeeze(1)
    if len(full):
        packed.store(state[full, 0].float(), full, torch.zeros_like(full), packed.position[full])
    ring = (slots, packed.position.long() % window)
    packed.x[ring] = x[:, None].to(packed.x.dtype)
    packed.B[ring] = B[:, None].to(packed.B.dtype)
    packed.dt[ring] = dt.to(packed.dt.dtype)

    y = (state[:, 0] * C[:, None]).sum(-1)
    if D is not None:
        y = y + D.to(wide) * x
    if z is not None:
        y = y * F.silu(z.to(wide))
    return y.to(x.dtype)
