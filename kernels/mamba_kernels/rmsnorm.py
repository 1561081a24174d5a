"""RMSNorm with a gate, by groups, and the fused residual add + norm of a block.

    rmsnorm(u)[g] = u[g] / sqrt(mean(u[g]^2) + eps) * weight[g] (+ bias[g])      over each group g of a row

`rmsnorm_fn` has the signature and semantics of mamba_ssm's layernorm_gated.rmsnorm_fn: the gate silu(z)
multiplies the result, or, with norm_before_gate=False as in every released Mamba-2 model, what is
normalised (Mamba-2, arXiv 2405.21060, sections 7.1 and, for groups, 8.1; RMSNorm, arXiv 1910.07467).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from mamba_kernels.backend import backend_for
from mamba_kernels.checks import check, check_device, check_shape

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_KERNEL_WIDTH = 65536  # one program holds a whole group: 64 float32 values a thread at 32 warps


def rmsnorm_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
) -> torch.Tensor:
    """Normalise rows by groups, with a gate: rmsnorm(x) * silu(z), or rmsnorm(x * silu(z)) where not
    norm_before_gate. Differentiable in x, weight, bias and z; computed in float32.

    x, z: (..., width), floating point, of any strides; rows that are a slice of a wider tensor are not
        copied.
    weight, bias: (width,).
    group_size: features a group, a divisor of width; None for one group.

    Returns a tensor of x's shape and dtype, contiguous. Gradients are the same in every run. Raises
    ValueError naming the argument that does not fit.
    """
    width = _check_rows(x, weight, bias)
    check_shape("z", z, x.shape)
    check_device(x.device, z=z)
    if group_size is None:
        group_size = width
    check(group_size > 0 and width % group_size == 0, "group_size", f"a divisor of {width}", group_size)
    if backend_for(x.device) == "torch" or x.numel() == 0:
        return rmsnorm_ref(x, weight, bias, z, eps, group_size, norm_before_gate)
    _check_kernel("group_size", group_size, x.dtype)
    y = _RMSNorm.apply(
        _rows(x), weight.contiguous(), _contiguous(bias), _rows(z), eps, group_size, norm_before_gate
    )
    return y.view(x.shape)


def rmsnorm_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
) -> torch.Tensor:
    """rmsnorm_fn in torch operations, in float32 or wider; it is what runs on the CPU.

    In place where it can be: each array more costs page faults, which are most of the time on 512 rows.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    gate = None if z is None else F.silu(z.to(wide))
    u = x.to(wide) if gate is None or norm_before_gate else gate.mul_(x)
    groups = u.unflatten(-1, (-1, group_size or u.shape[-1]))
    y = (groups * _rsqrt_mean_square(groups, eps)).flatten(-2).mul_(weight)
    if bias is not None:
        y.add_(bias)
    if gate is not None and norm_before_gate:
        y.mul_(gate)
    return y.to(x.dtype)


def add_norm_fn(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    residual_in_fp32: bool = True,
    is_rms_norm: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add a block's output to the residual stream and normalise the sum for the next block, forward only.

    x: (..., width), floating point, of any strides. residual: the same shape, or None for the first block.
    weight, bias: (width,). is_rms_norm: RMSNorm, else LayerNorm.

    Returns (y, residual_out): y = norm(x + residual) of x's dtype, and x + residual in float32, or in x's
    dtype where not residual_in_fp32; y is of the sum before that rounding. Raises ValueError naming the
    argument that does not fit.
    """
    width = _check_rows(x, weight, bias)
    check_shape("residual", residual, x.shape)
    check_device(x.device, residual=residual)
    with torch.no_grad():
        if backend_for(x.device) == "torch" or x.numel() == 0:
            return add_norm_ref(x, residual, weight, bias, eps, residual_in_fp32, is_rms_norm)
        _check_kernel("x", width, x.dtype)
        from mamba_kernels import rmsnorm_triton

        y, total = rmsnorm_triton.add_norm_fwd(
            _rows(x),
            _rows(residual),
            weight.contiguous(),
            _contiguous(bias),
            eps,
            torch.float32 if residual_in_fp32 else x.dtype,
            is_rms_norm,
        )
        return y.view(x.shape), total.view(x.shape)


def add_norm_ref(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    residual_in_fp32: bool = True,
    is_rms_norm: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """add_norm_fn in torch operations, in float32 or wider; it is what runs on the CPU."""
    wide = torch.promote_types(x.dtype, torch.float32)
    total = x.to(wide) if residual is None else x.to(wide) + residual
    u = total if is_rms_norm else total - total.mean(dim=-1, keepdim=True)
    y = (u * _rsqrt_mean_square(u, eps)).mul_(weight)
    if bias is not None:
        y.add_(bias)
    return y.to(x.dtype), total if residual_in_fp32 else total.to(x.dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, weight, bias, z, eps, group_size, norm_before_gate):
        from mamba_kernels import rmsnorm_triton

        ctx.save_for_backward(x, weight, bias, z)
        ctx.options = (eps, group_size, norm_before_gate)
        return rmsnorm_triton.rmsnorm_fwd(x, weight, bias, z, *ctx.options)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy):
        from mamba_kernels import rmsnorm_triton

        x, weight, bias, z = ctx.saved_tensors
        dx, dweight, dbias, dz = rmsnorm_triton.rmsnorm_bwd(_rows(dy), x, weight, bias, z, *ctx.options)
        return dx, dweight, dbias, dz, None, None, None


def _rsqrt_mean_square(u: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / sqrt(mean(u^2) + eps) of the last axis; a norm needs no array of squares."""
    return (torch.linalg.vector_norm(u, dim=-1, keepdim=True).square() / u.shape[-1] + eps).rsqrt()


def _check_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> int:
    """Check what the public functions share; returns the width of a row."""
    check(x.dim() > 0, "x", "at least one dimension", tuple(x.shape))
    width = x.shape[-1]
    check_shape("weight", weight, (width,))
    check_shape("bias", bias, (width,))
    check_device(x.device, weight=weight, bias=bias)
    return width


def _check_kernel(name: str, size: int, dtype: torch.dtype) -> None:
    check(dtype in KERNEL_DTYPES, "x", "float32, bfloat16 or float16", dtype)
    check(size <= MAX_KERNEL_WIDTH, name, f"at most {MAX_KERNEL_WIDTH} features a group", size)


def _rows(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """As (rows, width) with adjacent features, without a copy where the strides allow it."""
    if tensor is None:
        return None
    tensor = tensor.reshape(-1, tensor.shape[-1])
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()
