"""One token of the Mamba-2 recurrence on a packed state: `decode_layer.ssm_step` beside `packed_state`.

    y_t = C_t (exp(A sum dt) stored) + sum over the window of exp(A (dt after i)) dt_i (C_t B_i) x_i + D x_t

The stored state is read at every token and written once in a window, when a head folds.

On Triton that is two kernels a layer, one after the other in the stream: the first makes what all rows of a
head, or all heads of a group, have in common, and takes dt and B into the window; the second reads each head,
folds those whose turn it is, and takes x. What the first hands over lies in `PackedState.work`, which the
layer's first token allocates and the ones after it fill anew.

Told of the step by a `Preparation`, `decode_layer.in_proj_step` runs the first, and behind a product of the
library that is no kernel of its own but part of the one that convolves.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from mamba_kernels.backend import backend_for
from mamba_kernels.checks import check, check_device, check_shape, check_slots
from mamba_kernels.decode_layer_torch import gate_and_norm
from mamba_kernels.decode_norm import NormBuffers, Normed
from mamba_kernels.packed_state import PackedState
from mamba_kernels.state_codes import FORMATS, decode, dot


class Preparation(NamedTuple):
    """Arguments of a `packed_ssm_step` to come, by which `in_proj_step` prepares it; see there."""

    packed: PackedState
    dt_bias: torch.Tensor
    A_log: torch.Tensor
    dt_limit: tuple[float, float] = (0.0, float("inf"))


def packed_ssm_step(
    zxbcdt: torch.Tensor,
    packed: PackedState,
    dt_bias: torch.Tensor,
    A_log: torch.Tensor,
    D: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    out: NormBuffers,
    *,
    ngroups: int,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    norm_before_gate: bool = False,
    gate: bool = True,
    state_batch_indices: torch.Tensor | None = None,
    prepared: bool = False,
    pdl: bool = False,
    config: dict[str, Any] | None = None,
) -> Normed:
    """Advance a packed state by one token and gate its output.

    The caller counts the token, once all layers have read it: `packed_state.advance_positions`.

    Args:
        zxbcdt: (batch, 2 * d_ssm + 2 * ngroups * d_state + nheads), x, B, C after the convolution, in the
            dtype of packed.x, or in torch a wider one, of which the window keeps what fits it. The columns
            of z are not read where there is no gate.
        packed: the layer's state; its codes, scales and window change in place.
        dt_bias, A_log: (nheads,). D: (nheads,) or (nheads, headdim). dt = softplus(dt + dt_bias), clamped
            to dt_limit; A = -exp(A_log).
        norm_weight: (d_ssm,) of the grouped norm, of y * silu(z), or of y alone where norm_before_gate
            (then times silu(z)); None: no norm.
        gate: False gives y itself; then there is no norm.
        state_batch_indices: (batch,) integers, the slot that each row of the batch advances; none twice.
            Negative is padding: no state changes, the output is zero. Default: row b has slot b.
        prepared: `in_proj_step` had this step's arguments, and nothing has used the state since. (Torch
            prepares nothing: there this makes no difference.)

    Returns:
        The gated output, normalised, with out.scaled as (batch, d_ssm).

    Raises:
        ValueError: a shape, a dtype or a device is not as said above.
    """
    _check_arguments(zxbcdt, packed, dt_bias, A_log, D, norm_weight, out, ngroups, gate, state_batch_indices)
    if backend_for(zxbcdt.device) == "triton":
        from mamba_kernels.packed_ssm_step_triton import launch_packed_ssm_step

        check(zxbcdt.dtype != torch.float64, "zxbcdt", "float32, bfloat16 or float16", zxbcdt.dtype)
        expected = f"{packed.x.dtype}, as the state's window"
        check(zxbcdt.dtype == packed.x.dtype, "zxbcdt", expected, zxbcdt.dtype)
        parts = launch_packed_ssm_step(
            zxbcdt, packed, dt_bias, A_log, D, norm_weight, *out, ngroups=ngroups, dt_limit=dt_limit,
            norm_before_gate=norm_before_gate, gate=gate, slots=state_batch_indices, prepared=prepared,
            pdl=pdl, config=config,
        )  # fmt: skip
        return Normed(out.scaled, None, eps) if norm_weight is None else out.used(parts, ngroups, eps)
    return packed_ssm_step_ref(
        zxbcdt, packed, dt_bias, A_log, D, norm_weight, eps, out, ngroups=ngroups, dt_limit=dt_limit,
        norm_before_gate=norm_before_gate, gate=gate, state_batch_indices=state_batch_indices,
    )  # fmt: skip


def packed_ssm_step_ref(
    zxbcdt: torch.Tensor,
    packed: PackedState,
    dt_bias: torch.Tensor,
    A_log: torch.Tensor,
    D: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    out: NormBuffers,
    *,
    ngroups: int,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    norm_before_gate: bool = False,
    gate: bool = True,
    state_batch_indices: torch.Tensor | None = None,
) -> Normed:
    """`packed_ssm_step` in plain torch on any device; float64 inside where zxbcdt is."""
    batch, nheads, headdim, d_state = (
        zxbcdt.shape[0],
        len(packed.format.heads),
        packed.headdim,
        packed.d_state,
    )
    d_ssm = nheads * headdim
    wide = torch.float64 if zxbcdt.dtype == torch.float64 else torch.float32
    dt_bias, A_log, D = (t.to(wide) for t in (dt_bias, A_log, D))
    z, x, B, C, dt = zxbcdt.to(wide).split(
        [d_ssm, d_ssm, ngroups * d_state, ngroups * d_state, nheads], dim=1
    )
    x = x.view(batch, nheads, headdim)
    B, C = (t.view(batch, ngroups, d_state) for t in (B, C))
    dt = F.softplus(dt + dt_bias).clamp(*dt_limit)
    A = -torch.exp(A_log)

    rows = torch.arange(batch, device=zxbcdt.device)
    slots = rows if state_batch_indices is None else state_batch_indices.long()
    y = x.new_zeros(batch, nheads, headdim)
    live = slots >= 0
    if live.all():
        y = _advance(packed, slots, x, B, C, dt, A)
    elif live.any():
        y[live] = _advance(packed, slots[live], x[live], B[live], C[live], dt[live], A)
    y = y + (D if D.dim() == 2 else D[:, None]) * x
    y = torch.where(live[:, None, None], y, 0.0).flatten(1)
    z = torch.where(live[:, None], z, 0.0)

    if not gate:
        out.scaled.copy_(y)
        return Normed(out.scaled, None, eps)
    return gate_and_norm(y, z, norm_weight, eps, out, ngroups, norm_before_gate)


def _advance(
    packed: PackedState,
    slots: torch.Tensor,
    x: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
) -> torch.Tensor:
    """Read one token into `slots` (batch,); return C h (batch, nheads, headdim).

    x: (batch, nheads, headdim). B, C: (batch, ngroups, d_state). dt: (batch, nheads). A: (nheads,).
    """
    window, nheads = packed.format.window, x.shape[1]
    heads_per_group = nheads // B.shape[1]
    position = packed.position[slots].long()
    heads = torch.arange(nheads, device=slots.device)
    past_x, past_B, past_dt = (t.to(x.dtype) for t in packed.window(slots))

    # All inputs that the stored state lacks, the newest, this token, first.
    xs = torch.cat([x[:, None], past_x], 1)
    Bs = torch.cat([B[:, None], past_B], 1)
    dts = torch.cat([dt[:, None], past_dt], 1)
    since = torch.cat([torch.zeros_like(dts[:, :1]), dts.cumsum(1)], 1)  # dt after each, and of them all
    weighted = (torch.exp(since[:, :-1] * A) * dts)[..., None] * xs
    decay = torch.exp(since[:, -1] * A)
    CB = torch.einsum("bgn,bwgn->bwg", C, Bs).repeat_interleave(heads_per_group, 2)
    C = C.repeat_interleave(heads_per_group, 1)
    y = decay[..., None] * _read_stored(packed, slots, C) + (CB[..., None] * weighted).sum(1)

    row, head = torch.nonzero((position[:, None] + heads) % window == window - 1, as_tuple=True)
    if len(row):
        inputs = weighted[row, :, head].transpose(1, 2) @ Bs[row, :, head // heads_per_group]
        folded = (
            _stored_heads(packed, slots[row], head).to(x.dtype) * decay[row, head][:, None, None] + inputs
        )
        packed.store(folded.float(), slots[row], head, position[row])
    ring = (slots, position % window)
    packed.x[ring] = x.to(packed.x.dtype)
    packed.B[ring] = B.to(packed.B.dtype)
    packed.dt[ring] = dt.to(packed.dt.dtype)
    return y


def _read_stored(packed: PackedState, slots: torch.Tensor, C: torch.Tensor) -> torch.Tensor:
    """C (batch, nheads, d_state) times the stored states of `slots` (batch,): (batch, nheads, headdim)."""
    y = C.new_empty(*C.shape[:2], packed.headdim)
    everything = len(slots) == packed.slots
    for group in packed.groups:
        heads = slice(None) if len(packed.groups) == 1 else list(group.heads)
        own = C[:, heads]
        if packed.columns is not None and FORMATS[group.dtype].largest is not None:
            own = own * packed.columns[heads]
        words = packed.words(group)
        words, scales = (words, packed.scales) if everything else (words[slots], packed.scales[slots])
        y[:, heads] = dot(words, scales[:, heads], group.dtype, own)
    return y


def _stored_heads(packed: PackedState, slots: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    """The stored states of heads[i] of slots[i], without their windows, float32 (pairs, headdim, d_state)."""
    state = packed.scales.new_empty(len(slots), packed.headdim, packed.d_state)
    for group in packed.groups:
        place = torch.full((len(packed.format.heads),), -1, device=heads.device)
        place[list(group.heads)] = torch.arange(len(group.heads), device=heads.device)
        own = (place[heads] >= 0).nonzero().squeeze(1)
        slot, head = slots[own], heads[own]
        part = decode(
            packed.words(group)[slot, place[head]], packed.scales[slot, head], group.dtype, packed.d_state
        )
        if packed.columns is not None and FORMATS[group.dtype].largest is not None:
            part = part * packed.columns[head, None, :]
        state[own] = part
    return state


def check_preparation(
    given: Preparation, zxbcdt: torch.Tensor, d_ssm: int, conv_dim: int, slots: torch.Tensor | None
) -> None:
    """Raise unless the step of zxbcdt, whose x begins at d_ssm, can be prepared behind its convolution."""
    packed, dt_bias, A_log, _ = given
    nheads, (ngroups, d_state) = len(packed.format.heads), packed.B.shape[2:]
    check(d_ssm == nheads * packed.headdim, "d_ssm", f"{nheads * packed.headdim}, as the state's", d_ssm)
    channels = d_ssm + 2 * ngroups * d_state
    check(conv_dim == channels, "conv_state", f"{channels} channels, of x, B and C", conv_dim)
    check_shape("out", zxbcdt, (zxbcdt.shape[0], d_ssm + channels + nheads))
    check_shape("dt_bias", dt_bias, (nheads,))
    check_shape("A_log", A_log, (nheads,))
    check_slots(slots, zxbcdt.shape[0], "packed", packed.codes)
    check_device(zxbcdt.device, codes=packed.codes, dt_bias=dt_bias, A_log=A_log)
    if backend_for(zxbcdt.device) == "triton":
        check(zxbcdt.dtype == packed.x.dtype, "out", f"{packed.x.dtype}, as the state's window", zxbcdt.dtype)


def _check_arguments(
    zxbcdt: torch.Tensor,
    packed: PackedState,
    dt_bias: torch.Tensor,
    A_log: torch.Tensor,
    D: torch.Tensor,
    norm_weight: torch.Tensor | None,
    out: NormBuffers,
    ngroups: int,
    gate: bool,
    slots: torch.Tensor | None,
) -> None:
    batch, nheads, headdim, d_state = (
        zxbcdt.shape[0],
        len(packed.format.heads),
        packed.headdim,
        packed.d_state,
    )
    d_ssm = nheads * headdim
    check(ngroups == packed.B.shape[2], "ngroups", f"{packed.B.shape[2]}, as the state's", ngroups)
    check(nheads % ngroups == 0, "ngroups", f"a divisor of {nheads} heads", ngroups)
    check_shape("zxbcdt", zxbcdt, (batch, 2 * d_ssm + 2 * ngroups * d_state + nheads))
    check(zxbcdt.stride(1) == 1, "zxbcdt", "unit stride along a row", f"strides {zxbcdt.stride()}")
    check_shape("dt_bias", dt_bias, (nheads,))
    check_shape("A_log", A_log, (nheads,))
    check_shape("D", D, (nheads,) if D.dim() == 1 else (nheads, headdim))
    check_shape("norm_weight", norm_weight, (d_ssm,))
    check(gate or norm_weight is None, "norm_weight", "None where there is no gate", "a norm")
    check(norm_weight is None or out.squares is not None, "out.squares", "sums of the norm", None)
    for name, tensor in (("out.scaled", out.scaled), ("out.squares", out.squares)):
        check_shape(name, tensor, (batch, d_ssm))
    check(out.scaled.stride(1) == 1, "out.scaled", "unit stride along a row", out.scaled.stride())
    check_slots(slots, batch, "packed", packed.codes)
    check_device(
        zxbcdt.device, codes=packed.codes, dt_bias=dt_bias, A_log=A_log, D=D, norm_weight=norm_weight,
        scaled=out.scaled, squares=out.squares, state_batch_indices=slots,
    )  # fmt: skip
