"""The functions of decode_layer in plain torch: what the Triton kernels are tested against.

The same arguments and the same effects, for any device; float64 throughout where the data is float64,
else float32 inside. The arguments are checked by their callers in decode_layer.
"""

import torch
import torch.nn.functional as F

from mamba_kernels.decode_norm import NormBuffers, Normed, fill_normed, normalise


def embed_step(
    token_ids: torch.Tensor,
    embedding: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor,
    out: NormBuffers,
) -> Normed:
    residual.copy_(embedding[token_ids])
    return fill_normed(residual, norm_weight, eps, out)


def in_proj_step(
    normed: Normed,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    d_ssm: int,
    state_batch_indices: torch.Tensor | None = None,
) -> None:
    y = _linear(normed, weight, bias)
    channels = slice(d_ssm, d_ssm + conv_state.shape[1])
    slots, live = read_slots(state_batch_indices, y.shape[0], y.device)
    old = torch.where(live[:, None, None], conv_state[slots], 0.0).to(y.dtype)
    window = torch.cat([old[:, :, 1:], y[:, channels, None]], dim=2)
    conv_state[slots[live]] = window[live].to(conv_state.dtype)
    conv = (window * conv_weight.to(y.dtype)).sum(-1)
    if conv_bias is not None:
        conv = conv + conv_bias.to(y.dtype)
    out.copy_(y)
    out[:, channels] = F.silu(conv).to(out.dtype)


def ssm_step(
    zxbcdt: torch.Tensor,
    ssm_state: torch.Tensor,
    dt_bias: torch.Tensor,
    A_log: torch.Tensor,
    D: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    out: NormBuffers,
    *,
    ngroups: int,
    dt_limit: tuple[float, float],
    norm_before_gate: bool,
    state_batch_indices: torch.Tensor | None,
) -> Normed:
    _, nheads, headdim, d_state = ssm_state.shape
    batch, d_ssm = zxbcdt.shape[0], nheads * headdim
    wide = torch.float64 if zxbcdt.dtype == torch.float64 else torch.float32
    dt_bias, A_log, D = (t.to(wide) for t in (dt_bias, A_log, D))
    widths = [d_ssm, d_ssm, ngroups * d_state, ngroups * d_state, nheads]
    z, x, B, C, dt = zxbcdt.to(wide).split(widths, dim=1)
    x = x.view(batch, nheads, headdim)
    B, C = (t.view(batch, ngroups, 1, d_state).repeat_interleave(nheads // ngroups, dim=1) for t in (B, C))
    dt = F.softplus(dt + dt_bias).clamp(*dt_limit)[..., None, None]

    slots, live = read_slots(state_batch_indices, batch, zxbcdt.device)
    decay = torch.exp(dt * -torch.exp(A_log)[:, None, None])
    state = ssm_state[slots].to(wide) * decay + dt * x[..., None] * B
    ssm_state[slots[live]] = state[live].to(ssm_state.dtype)
    y = (state * C).sum(-1) + (D if D.dim() == 2 else D[:, None]) * x
    y = torch.where(live[:, None, None], y, 0.0).flatten(1)

    return gate_and_norm(y, z, norm_weight, eps, out, ngroups, norm_before_gate)


def gate_and_norm(
    y: torch.Tensor,
    z: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    out: NormBuffers,
    ngroups: int,
    norm_before_gate: bool,
) -> Normed:
    """The output y (batch, d_ssm) of a recurrence, gated by z, as the `Normed` of its grouped norm."""
    gated = y * F.silu(z)
    if norm_weight is None:
        out.scaled.copy_(gated)
        return Normed(out.scaled, None, eps)
    out.scaled.copy_(gated * norm_weight.to(y.dtype))
    normed = y if norm_before_gate else gated
    out.squares[:, :ngroups] = normed.unflatten(1, (ngroups, -1)).square().sum(-1)
    return out.used(ngroups, ngroups, eps)


def out_proj_step(
    normed: Normed,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    out: NormBuffers,
) -> Normed:
    y = _linear(normed, weight, bias)
    residual.copy_(residual.to(y.dtype) + y)
    return fill_normed(residual, norm_weight, eps, out)


def lm_head_step(normed: Normed, weight: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(_linear(normed, weight, None))


def _linear(normed: Normed, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    x = normalise(normed)
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def read_slots(
    indices: torch.Tensor | None, batch: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The slot of each row of the batch, 0 for padding, and which rows are not padding."""
    slots = torch.arange(batch, device=device) if indices is None else indices.long()
    return slots.clamp(min=0), slots >= 0
