"""The functions of decode_mamba1 in plain torch: what the Triton kernels are tested against.

The same arguments and the same effects, for any device; float64 throughout where the data is float64,
else float32 inside. The arguments are checked by their callers in decode_mamba1.
"""

import torch
import torch.nn.functional as F

from mamba_kernels.decode_layer_torch import read_slots


def x_proj_step(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    wide = _wide(x)
    out.copy_(F.linear(x.to(wide), weight.to(wide)))


def mamba1_ssm_step(
    xz: torch.Tensor,
    dtBC: torch.Tensor,
    ssm_state: torch.Tensor,
    dt_weight: torch.Tensor,
    dt_bias: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    out: torch.Tensor,
    *,
    norm_eps: float | None,
    state_batch_indices: torch.Tensor | None,
) -> None:
    wide = _wide(xz)
    d_state = A.shape[1]
    dt_weight, dt_bias, A, D = (t.to(wide) for t in (dt_weight, dt_bias, A, D))
    x, z = xz.to(wide).chunk(2, dim=1)
    dt, B, C = dtBC.to(wide).split([dt_weight.shape[1], d_state, d_state], dim=1)
    if norm_eps is not None:
        dt, B, C = (F.rms_norm(part, part.shape[1:], eps=norm_eps) for part in (dt, B, C))
    dt = F.softplus(F.linear(dt, dt_weight, dt_bias))

    slots, live = read_slots(state_batch_indices, xz.shape[0], xz.device)
    state = ssm_state[slots].to(wide) * torch.exp(dt[..., None] * A) + (dt * x)[..., None] * B[:, None]
    ssm_state[slots[live]] = state[live].to(ssm_state.dtype)
    y = ((state * C[:, None]).sum(-1) + D * x) * F.silu(z)
    out.copy_(torch.where(live[:, None], y, 0.0))


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
