"""A Mamba-1 mixer from its input projection's result to its output, as one differentiable operation.

    x, z = xz;  x = silu(conv(x));  dt, B, C = x_proj(x);  delta = delta_proj(dt)
    out = out_proj(selective_scan(x, delta, A, B, C, D, z))

(Mamba, https://arxiv.org/abs/2312.00752, section 3.4 and figure 3.) Names and argument order are those of
mamba_ssm. The RMS norms of dt, B and C are those of Jamba (https://arxiv.org/abs/2403.19887, section 6.4)
and FalconMamba (https://arxiv.org/abs/2410.05355).
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from mamba_kernels.backend import backend_for, use_backend
from mamba_kernels.causal_conv1d import causal_conv1d_fn
from mamba_kernels.checks import check, check_device, check_rank, check_shape
from mamba_kernels.selective_scan import (
    ScanInputs,
    checked,
    scan_backward,
    scan_forward,
    selective_scan_fn,
)


class _Tensors(NamedTuple):
    """What the scan's inputs are computed from."""

    xz: torch.Tensor
    conv1d_weight: torch.Tensor
    conv1d_bias: torch.Tensor | None
    x_proj_weight: torch.Tensor
    delta_proj_weight: torch.Tensor
    A: torch.Tensor
    B: torch.Tensor | None
    C: torch.Tensor | None
    D: torch.Tensor | None
    delta_bias: torch.Tensor | None
    B_proj_bias: torch.Tensor | None
    C_proj_bias: torch.Tensor | None
    b_rms_weight: torch.Tensor | None
    c_rms_weight: torch.Tensor | None
    dt_rms_weight: torch.Tensor | None
    deltaA: torch.Tensor | None


class _Options(NamedTuple):
    delta_softplus: bool
    discretization: str
    checkpoint_lvl: int
    rms_eps: float
    rms_all: bool


def mamba_inner_fn(
    xz: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor | None,
    x_proj_weight: torch.Tensor,
    delta_proj_weight: torch.Tensor,
    out_proj_weight: torch.Tensor,
    out_proj_bias: torch.Tensor | None,
    A: torch.Tensor,
    B: torch.Tensor | None = None,
    C: torch.Tensor | None = None,
    D: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    B_proj_bias: torch.Tensor | None = None,
    C_proj_bias: torch.Tensor | None = None,
    delta_softplus: bool = True,
    checkpoint_lvl: int = 1,
    b_rms_weight: torch.Tensor | None = None,
    c_rms_weight: torch.Tensor | None = None,
    dt_rms_weight: torch.Tensor | None = None,
    b_c_dt_rms_eps: float = 1e-6,
    *,
    b_c_dt_rms: bool = False,
    deltaA: torch.Tensor | None = None,
    discretization: str = "mamba",
) -> torch.Tensor:
    """Run the mixer on whole sequences; differentiable, once, in every tensor.

    Args:
        xz: (batch, 2 * dim, seqlen): the channels of x, then those of the gate z.
        conv1d_weight: (dim, 1, width), 2 <= width <= 4. conv1d_bias: (dim,).
        x_proj_weight: (rows, dim); the rows make dt (dt_rank), then B unless given (d_state), then C
            unless given (d_state). Where A is complex, B and C have 2 * d_state rows, real and imaginary
            parts in turn.
        delta_proj_weight: (dim, dt_rank). out_proj_weight: (d_model, dim). out_proj_bias: (d_model,).
        A, D, delta_bias, deltaA, delta_softplus, discretization: as in selective_scan_fn; so are B and C,
            which replace what x_proj would make.
        B_proj_bias, C_proj_bias: (d_state,), or (2 * d_state,) where A is complex.
        checkpoint_lvl: 0 keeps x after the convolution and delta for the backward pass; 1 computes them
            again there. Neither keeps the states.
        b_rms_weight, c_rms_weight: of B_proj_bias's shape: normalise B and C over their states.
        dt_rms_weight: (dt_rank,): normalise dt before delta_proj, as Jamba and FalconMamba do; or (dim,):
            normalise delta after it, as mamba_ssm does.
        b_c_dt_rms: normalise B, C and dt also where there is no weight (FalconMamba).

    Returns:
        (batch, seqlen, d_model).

    Raises:
        ValueError: a shape or a device is not as said above; the message names the argument.
    """
    tensors = _Tensors(
        xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, A, B, C, D, delta_bias,
        B_proj_bias, C_proj_bias, b_rms_weight, c_rms_weight, dt_rms_weight, deltaA,
    )  # fmt: skip
    options = _Options(delta_softplus, discretization, checkpoint_lvl, b_c_dt_rms_eps, b_c_dt_rms)
    _check_arguments(tensors, options, out_proj_weight, out_proj_bias)
    given = [t for t in (out_proj_weight, out_proj_bias, *tensors) if t is not None]
    with use_backend(_backend(xz)):
        if torch.is_grad_enabled() and any(t.requires_grad for t in given):
            return _MambaInner.apply(options, out_proj_weight, out_proj_bias, *tensors)
        out, _, _ = scan_forward(_scan_inputs(tensors, options), save_starts=False)
    return _out_proj(out, out_proj_weight, out_proj_bias)


def mamba_inner_ref(
    xz: torch.Tensor,
    conv1d_weight: torch.Tensor,
    conv1d_bias: torch.Tensor | None,
    x_proj_weight: torch.Tensor,
    delta_proj_weight: torch.Tensor,
    out_proj_weight: torch.Tensor,
    out_proj_bias: torch.Tensor | None,
    A: torch.Tensor,
    B: torch.Tensor | None = None,
    C: torch.Tensor | None = None,
    D: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    B_proj_bias: torch.Tensor | None = None,
    C_proj_bias: torch.Tensor | None = None,
    delta_softplus: bool = True,
    checkpoint_lvl: int = 1,
    b_rms_weight: torch.Tensor | None = None,
    c_rms_weight: torch.Tensor | None = None,
    dt_rms_weight: torch.Tensor | None = None,
    b_c_dt_rms_eps: float = 1e-6,
    *,
    b_c_dt_rms: bool = False,
    deltaA: torch.Tensor | None = None,
    discretization: str = "mamba",
) -> torch.Tensor:
    """mamba_inner_fn from its parts one after another, as mamba_ssm has it; checkpoint_lvl has no meaning.

    The parts are those of the backend, so that the result is mamba_inner_fn's to the last bit; in float64,
    and on the torch backend, they are their references.
    """
    tensors = _Tensors(
        xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, A, B, C, D, delta_bias,
        B_proj_bias, C_proj_bias, b_rms_weight, c_rms_weight, dt_rms_weight, deltaA,
    )  # fmt: skip
    options = _Options(delta_softplus, discretization, checkpoint_lvl, b_c_dt_rms_eps, b_c_dt_rms)
    _check_arguments(tensors, options, out_proj_weight, out_proj_bias)
    with use_backend(_backend(xz)):
        out = selective_scan_fn(**_scan_inputs(tensors, options)._asdict())
        return _out_proj(out, out_proj_weight, out_proj_bias)


class _MambaInner(torch.autograd.Function):
    """The scan and out_proj are differentiated here; what comes before, by a graph of its own.

    That graph, from the tensors to the scan's inputs, is kept from the forward pass at checkpoint level 0,
    and built in the backward pass at level 1.
    """

    @staticmethod
    def forward(
        ctx: Any,
        options: _Options,
        out_proj_weight: torch.Tensor,
        out_proj_bias: torch.Tensor | None,
        *tensors: torch.Tensor | None,
    ) -> torch.Tensor:
        device = tensors[0].device.type
        ctx.options = options
        ctx.backend = _backend(tensors[0])
        ctx.autocast = {
            "device_type": device,
            "enabled": torch.is_autocast_enabled(device),
            "dtype": torch.get_autocast_dtype(device),
        }
        if options.checkpoint_lvl == 0:
            ctx.graph = _graph(tensors, ctx.needs_input_grad[3:], options)
            inputs = ctx.graph[1]
        else:
            inputs = _scan_inputs(_Tensors(*tensors), options)
        out, _, starts = scan_forward(inputs, save_starts=True)
        ctx.save_for_backward(out_proj_weight, out_proj_bias, starts, *tensors)
        return _out_proj(out, out_proj_weight, out_proj_bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        out_proj_weight, out_proj_bias, starts, *tensors = ctx.saved_tensors
        needed = ctx.needs_input_grad[3:]
        with use_backend(ctx.backend), torch.autocast(**ctx.autocast):
            kept = ctx.options.checkpoint_lvl == 0
            leaves, inputs = ctx.graph if kept else _graph(tensors, needed, ctx.options)
            dy = _times(out_proj_weight.t(), dout.transpose(1, 2))
            values = {name: tensor.detach() for name, tensor in inputs.given().items()}
            grads, y = scan_backward(inputs._replace(**values), starts, dy, None, save_out=True)
            dout_proj_weight = torch.einsum("ble,bdl->ed", dout, y)
            dout_proj_bias = None if out_proj_bias is None else dout.sum((0, 1))
            ends = [name for name in grads if getattr(inputs, name).requires_grad]
            found = torch.autograd.grad(
                [getattr(inputs, name) for name in ends],
                [leaf for leaf in leaves if leaf is not None and leaf.requires_grad],
                [grads[name] for name in ends],
                retain_graph=kept,
                allow_unused=True,
            )
        remaining = iter(found)
        dtensors = (next(remaining) if leaf_needed else None for leaf_needed in needed)
        return None, dout_proj_weight, dout_proj_bias, *dtensors


def _graph(
    tensors: tuple[torch.Tensor | None, ...], needed: tuple[bool, ...], options: _Options
) -> tuple[list[torch.Tensor | None], ScanInputs]:
    """Return (leaves, the scan's inputs as a function of them); those leaves want a gradient that need it."""
    leaves = [
        None if t is None else t.detach().requires_grad_(want)
        for t, want in zip(tensors, needed, strict=True)
    ]
    with torch.enable_grad():
        return leaves, _scan_inputs(_Tensors(*leaves), options)


def _scan_inputs(tensors: _Tensors, options: _Options) -> ScanInputs:
    """Go from xz to the scan, by the products that mamba_ssm takes, in their shapes and order.

    So the whole rounds as its parts do one after another: where numbers are large, a product in another shape
    is as exact, but what a scan makes of the difference would be seen.
    """
    x, z = tensors.xz.chunk(2, dim=1)
    x = causal_conv1d_fn(x, tensors.conv1d_weight.squeeze(1), tensors.conv1d_bias, activation="silu")
    tokens = F.linear(x.transpose(1, 2).flatten(0, 1), tensors.x_proj_weight)
    rows = tokens.unflatten(0, (x.shape[0], x.shape[2])).transpose(1, 2)
    dt, *projected = rows.split(_rows(tensors), dim=1)
    B = tensors.B if tensors.B is not None else projected.pop(0)
    C = tensors.C if tensors.C is not None else projected.pop(0)
    if tensors.B is None:
        B = _finish(B, tensors.B_proj_bias, tensors.b_rms_weight, tensors.A, options)
    if tensors.C is None:
        C = _finish(C, tensors.C_proj_bias, tensors.c_rms_weight, tensors.A, options)

    weight = tensors.dt_rms_weight
    before = weight is None or weight.shape[0] == dt.shape[1]
    if before and (options.rms_all or weight is not None):
        dt = _rms_norm(dt, weight, options.rms_eps)
    delta = tensors.delta_proj_weight @ dt.transpose(0, 1).flatten(1)
    delta = delta.unflatten(1, (x.shape[0], x.shape[2])).transpose(0, 1)
    if not before:
        delta = _rms_norm(delta, weight, options.rms_eps)
    return checked(
        x, delta, tensors.A, B, C, tensors.D, z, tensors.delta_bias, tensors.deltaA, None,
        options.delta_softplus, options.discretization,
    )  # fmt: skip


def _times(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """weight @ x, (m, n) @ (batch, n, seqlen), as a batched product: one by `weight` itself may copy x."""
    return weight.expand(x.shape[0], -1, -1) @ x


def _out_proj(y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Project y (batch, dim, seqlen) to (batch, seqlen, d_model), contiguous."""
    return F.linear(y.transpose(1, 2), weight, None if bias is None else bias.to(y.dtype))


def _finish(
    rows: torch.Tensor,
    bias: torch.Tensor | None,
    rms_weight: torch.Tensor | None,
    A: torch.Tensor,
    options: _Options,
) -> torch.Tensor:
    """Make B or C (batch, d_state, seqlen) of its rows of the projection."""
    if bias is not None:
        rows = rows + bias[:, None].to(rows.dtype)
    if options.rms_all or rms_weight is not None:
        rows = _rms_norm(rows, rms_weight, options.rms_eps)
    if A.is_complex():  # from pairs of rows to pairs of columns
        rows = rows.unflatten(1, (-1, 2)).transpose(2, 3).flatten(2)
    return rows.contiguous()


def _rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Normalise x (batch, n, seqlen) over n, in float32 or wider."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + eps)
    return (wide if weight is None else wide * weight[:, None].to(wide.dtype)).to(x.dtype)


def _rows(tensors: _Tensors) -> list[int]:
    """The numbers of rows of x_proj that make dt, B and C, without those that are given."""
    states = tensors.A.shape[1] * (2 if tensors.A.is_complex() else 1)
    return [tensors.delta_proj_weight.shape[1], *(states for t in (tensors.B, tensors.C) if t is None)]


def _backend(xz: torch.Tensor) -> str:
    """Kernels compute in float32: float64 runs on torch operations, as in the scan."""
    return "torch" if xz.dtype == torch.float64 else backend_for(xz.device)


def _check_arguments(
    tensors: _Tensors,
    options: _Options,
    out_proj_weight: torch.Tensor,
    out_proj_bias: torch.Tensor | None,
) -> None:
    """Raise ValueError unless the arguments fit each other; the scan checks its own inputs."""
    xz = tensors.xz
    check(options.checkpoint_lvl in (0, 1), "checkpoint_lvl", "0 or 1", options.checkpoint_lvl)
    check_rank("xz", xz, 3)
    check(xz.shape[1] % 2 == 0, "xz", "an even number of channels", xz.shape[1])
    dim = xz.shape[1] // 2
    check_rank("conv1d_weight", tensors.conv1d_weight, 3)
    check_shape("conv1d_weight", tensors.conv1d_weight, (dim, 1, tensors.conv1d_weight.shape[2]))
    check_shape("conv1d_bias", tensors.conv1d_bias, (dim,))
    check_rank("A", tensors.A, 2)
    check_rank("delta_proj_weight", tensors.delta_proj_weight, 2)
    dt_rank = tensors.delta_proj_weight.shape[1]
    check_shape("delta_proj_weight", tensors.delta_proj_weight, (dim, dt_rank))
    check_shape("x_proj_weight", tensors.x_proj_weight, (sum(_rows(tensors)), dim))
    check_rank("out_proj_weight", out_proj_weight, 2)
    check_shape("out_proj_weight", out_proj_weight, (out_proj_weight.shape[0], dim))
    check_shape("out_proj_bias", out_proj_bias, (out_proj_weight.shape[0],))
    states = tensors.A.shape[1] * (2 if tensors.A.is_complex() else 1)
    for letter, given in (("B", tensors.B), ("C", tensors.C)):
        for name in (f"{letter}_proj_bias", f"{letter.lower()}_rms_weight"):
            tensor = getattr(tensors, name)
            check(given is None or tensor is None, name, f"None, as {letter} is given", "a tensor")
            check_shape(name, tensor, (states,))
    if tensors.dt_rms_weight is not None:
        check(
            tuple(tensors.dt_rms_weight.shape) in ((dt_rank,), (dim,)),
            "dt_rms_weight", f"shape ({dt_rank},) or ({dim},)", tuple(tensors.dt_rms_weight.shape),
        )  # fmt: skip
    check_device(xz.device, out_proj_weight=out_proj_weight, out_proj_bias=out_proj_bias, **tensors._asdict())
