"""Triton kernels of the gated RMSNorm, forward and backward, and of residual add + norm.

A program holds ROWS whole groups at once, padded to BLOCK_N features, so that each element is read once.
Row offsets are int64.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from mamba_kernels.backend import interpreting
from mamba_kernels.triton_launch import stride_unit
from mamba_kernels.triton_math import sigmoid


@triton.jit(do_not_specialize=["rows"])
def _forward_kernel(
    x_ptr, weight_ptr, bias_ptr, z_ptr, y_ptr,
    rows, size, eps, stride_xr, stride_zr, stride_yr,
    HAS_BIAS: tl.constexpr, HAS_Z: tl.constexpr, NORM_BEFORE_GATE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, UNIT: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Program (row block, group): a tile (ROWS, BLOCK_N) of the `size` features of one group.

    The strides of x and z come in UNIT elements (see stride_unit).
    """
    stride_xr = tl.cast(stride_xr, tl.int64) * UNIT
    stride_zr = tl.cast(stride_zr, tl.int64) * UNIT
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    n = tl.arange(0, BLOCK_N)[None, :]
    feature = tl.program_id(1) * size + n
    mask = (row < rows) & (n < size)
    row = row.to(tl.int64)

    u = tl.load(x_ptr + row * stride_xr + feature, mask=mask, other=0.0).to(tl.float32)
    if HAS_Z:
        z = tl.load(z_ptr + row * stride_zr + feature, mask=mask, other=0.0).to(tl.float32)
        gate = z * sigmoid(z, INTERPRET)
        if not NORM_BEFORE_GATE:
            u *= gate
    weight = tl.load(weight_ptr + feature, mask=n < size, other=0.0).to(tl.float32)
    y = u * tl.rsqrt(tl.sum(u * u, axis=1)[:, None] / size + eps) * weight
    if HAS_BIAS:
        y += tl.load(bias_ptr + feature, mask=n < size, other=0.0).to(tl.float32)
    if HAS_Z and NORM_BEFORE_GATE:
        y *= gate
    tl.store(y_ptr + row * stride_yr + feature, y, mask=mask)


@triton.jit(do_not_specialize=["rows", "steps"])
def _backward_kernel(
    dy_ptr, x_ptr, weight_ptr, bias_ptr, z_ptr, dx_ptr, dz_ptr, parts_ptr,
    rows, size, width, steps, eps,
    stride_dyr, stride_xr, stride_zr, stride_dxr, stride_dzr,
    HAS_BIAS: tl.constexpr, HAS_Z: tl.constexpr, NORM_BEFORE_GATE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, UNIT: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Program (part, group): `steps` tiles (ROWS, BLOCK_N) of one group, the parts' rows interleaved.

    With h = u / rms(u) the normalised row and g the gradient that reaches h * weight + bias:
    du = (weight * g - h * mean(h * weight * g)) / rms(u); dweight sums h * g, dbias sums g. Each part
    writes its own sums, (parts, 2, width), for torch to add in a fixed order. The strides of x and z come
    in UNIT elements (see stride_unit).
    """
    stride_xr = tl.cast(stride_xr, tl.int64) * UNIT
    stride_zr = tl.cast(stride_zr, tl.int64) * UNIT
    part = tl.program_id(0)
    parts = tl.num_programs(0)
    n = tl.arange(0, BLOCK_N)[None, :]
    feature = tl.program_id(1) * size + n
    inside = n < size
    weight = tl.load(weight_ptr + feature, mask=inside, other=0.0).to(tl.float32)
    bias = 0.0
    if HAS_BIAS:
        bias = tl.load(bias_ptr + feature, mask=inside, other=0.0).to(tl.float32)
    dweight = tl.zeros((ROWS, BLOCK_N), tl.float32)
    dbias = tl.zeros((ROWS, BLOCK_N), tl.float32)

    for step in range(steps):
        row = (step * parts + part) * ROWS + tl.arange(0, ROWS)[:, None]
        mask = (row < rows) & inside
        row = row.to(tl.int64)
        g = tl.load(dy_ptr + row * stride_dyr + feature, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row * stride_xr + feature, mask=mask, other=0.0).to(tl.float32)
        u = x
        if HAS_Z:
            z = tl.load(z_ptr + row * stride_zr + feature, mask=mask, other=0.0).to(tl.float32)
            s = sigmoid(z, INTERPRET)
            gate = z * s
            dgate = s * (1.0 + z * (1.0 - s))  # silu'(z)
            if not NORM_BEFORE_GATE:
                u = x * gate
        rstd = tl.rsqrt(tl.sum(u * u, axis=1)[:, None] / size + eps)
        h = u * rstd
        if HAS_Z and NORM_BEFORE_GATE:
            dz = g * (h * weight + bias) * dgate
            g *= gate
        wg = weight * g
        dx = (wg - h * (tl.sum(h * wg, axis=1)[:, None] / size)) * rstd
        if HAS_Z and not NORM_BEFORE_GATE:
            dz = dx * x * dgate
            dx *= gate
        dweight += h * g
        if HAS_BIAS:
            dbias += g
        tl.store(dx_ptr + row * stride_dxr + feature, dx, mask=mask)
        if HAS_Z:
            tl.store(dz_ptr + row * stride_dzr + feature, dz, mask=mask)

    sums = parts_ptr + part.to(tl.int64) * 2 * width + feature
    tl.store(sums, tl.sum(dweight, axis=0)[None, :], mask=inside)
    tl.store(sums + width, tl.sum(dbias, axis=0)[None, :], mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _add_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, total_ptr,
    rows, size, eps, stride_xr, stride_rr,
    HAS_RESIDUAL: tl.constexpr, HAS_BIAS: tl.constexpr, IS_RMS_NORM: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (row block): a tile (ROWS, BLOCK_N) of whole rows; y and total are contiguous."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    n = tl.arange(0, BLOCK_N)[None, :]
    mask = (row < rows) & (n < size)
    row = row.to(tl.int64)

    u = tl.load(x_ptr + row * stride_xr + n, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        u += tl.load(residual_ptr + row * stride_rr + n, mask=mask, other=0.0).to(tl.float32)
    tl.store(total_ptr + row * size + n, u, mask=mask)
    weight = tl.load(weight_ptr + n, mask=n < size, other=0.0).to(tl.float32)
    if not IS_RMS_NORM:
        u = tl.where(mask, u - tl.sum(u, axis=1)[:, None] / size, 0.0)
    y = u * tl.rsqrt(tl.sum(u * u, axis=1)[:, None] / size + eps) * weight
    if HAS_BIAS:
        y += tl.load(bias_ptr + n, mask=n < size, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * size + n, y, mask=mask)


def config_for(rows: int, size: int) -> dict[str, Any]:
    """Tile and num_warps of the forward kernels: 32 elements a thread, several short rows a program."""
    block_n = triton.next_power_of_2(size)
    tile = max(block_n, 2048 if rows >= 1024 else 1)
    return {
        "ROWS": tile // block_n,
        "BLOCK_N": block_n,
        "num_warps": min(max(tile // 1024, 4 if tile >= 512 else 1), 32),
    }


def backward_config_for(rows: int, size: int, groups: int) -> dict[str, Any]:
    """Tile, num_warps and number of parts of the backward kernel: 16 elements a thread, for its sums."""
    block_n = triton.next_power_of_2(size)
    tile = max(block_n, 1024)
    row_blocks = triton.cdiv(rows, tile // block_n)
    return {
        "ROWS": tile // block_n,
        "BLOCK_N": block_n,
        "PARTS": min(row_blocks, max(1, 512 // groups)),
        "num_warps": min(max(tile // 512, 2), 32),
    }


def rmsnorm_fwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    z: torch.Tensor | None,
    eps: float,
    group_size: int,
    norm_before_gate: bool,
    config: dict[str, Any] | None = None,
) -> torch.Tensor:
    """Launch the forward kernel on x, z (rows, width) of adjacent features; returns y, contiguous."""
    rows, width = x.shape
    y = x.new_empty(rows, width)
    config = config or config_for(rows, group_size)
    stride_x, stride_z = x.stride(0), 0 if z is None else z.stride(0)
    unit = stride_unit(stride_x, stride_z)
    with torch.cuda.device_of(x):
        _forward_kernel[(triton.cdiv(rows, config["ROWS"]), width // group_size)](
            x, weight, x if bias is None else bias, x if z is None else z, y,
            rows, group_size, eps, stride_x // unit, stride_z // unit, width,
            HAS_BIAS=bias is not None, HAS_Z=z is not None, NORM_BEFORE_GATE=norm_before_gate,
            UNIT=unit, INTERPRET=interpreting(), **config,
        )  # fmt: skip
    return y


def rmsnorm_bwd(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    z: torch.Tensor | None,
    eps: float,
    group_size: int,
    norm_before_gate: bool,
    config: dict[str, Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Launch the backward kernel; returns (dx, dweight, dbias, dz), each of its input's dtype."""
    rows, width = x.shape
    groups = width // group_size
    dx = x.new_empty(rows, width)
    dz = None if z is None else z.new_empty(rows, width)
    config = dict(config or backward_config_for(rows, group_size, groups))
    parts = config.pop("PARTS")
    stride_x, stride_z = x.stride(0), 0 if z is None else z.stride(0)
    unit = stride_unit(stride_x, stride_z)
    sums = torch.empty(parts, 2, width, device=x.device, dtype=torch.float32)
    with torch.cuda.device_of(x):
        _backward_kernel[(parts, groups)](
            dy, x, weight, x if bias is None else bias, x if z is None else z,
            dx, dx if dz is None else dz, sums,
            rows, group_size, width, triton.cdiv(rows, parts * config["ROWS"]), eps,
            dy.stride(0), stride_x // unit, stride_z // unit, width, width,
            HAS_BIAS=bias is not None, HAS_Z=z is not None, NORM_BEFORE_GATE=norm_before_gate,
            UNIT=unit, INTERPRET=interpreting(), **config,
        )  # fmt: skip
    dweight, dbias = sums.sum(0)
    return dx, dweight.to(weight.dtype), None if bias is None else dbias.to(bias.dtype), dz


def add_norm_fwd(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    residual_dtype: torch.dtype,
    is_rms_norm: bool,
    config: dict[str, Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch add + norm on x, residual (rows, width) of adjacent features; returns (y, residual_out)."""
    rows, width = x.shape
    y = x.new_empty(rows, width)
    total = x.new_empty(rows, width, dtype=residual_dtype)
    config = config or config_for(rows, width)
    with torch.cuda.device_of(x):
        _add_norm_kernel[(triton.cdiv(rows, config["ROWS"]),)](
            x, x if residual is None else residual, weight, x if bias is None else bias, y, total,
            rows, width, eps, x.stride(0), 0 if residual is None else residual.stride(0),
            HAS_RESIDUAL=residual is not None, HAS_BIAS=bias is not None, IS_RMS_NORM=is_rms_norm,
            **config,
        )  # fmt: skip
    return y, total
