"""One token through a Mamba-1 model, in four to seven kernels a layer, for decoding in a CUDA graph.

    for each layer:
        in_proj_step       [x, z] = in_proj(norm(residual)); x = silu(conv1d(x))
        x_proj_step        [dt, B, C] = x_proj(x)
        mamba1_ssm_step    dt = softplus(dt_proj(dt)); h = exp(dt A) h + dt x B;  u = (C h + D x) silu(z)
        out_proj_step      residual += out_proj(u)

(Mamba, https://arxiv.org/abs/2312.00752, section 3 and algorithm 2.)

The first and the last are those of decode_layer, whose rules hold here too: every function writes into
buffers of its caller, neither allocates nor waits, and `pdl=True` lets a kernel load what no kernel of this
token writes while the kernel before it still runs. Few rows of a batch: a line is one kernel. Many rows:
the projections are the library's matrix products, dt_proj with them.

Activations and weights are float32, bfloat16 or float16.
"""

from typing import Any

import torch

from mamba_kernels import decode_mamba1_torch
from mamba_kernels.backend import backend_for
from mamba_kernels.checks import check, check_device, check_rows, check_shape, check_slots
from mamba_kernels.decode_layer import MANY_ROWS
from mamba_kernels.decode_norm import Normed


def x_proj_step(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    pdl: bool = False,
    config: dict[str, Any] | None = None,
) -> None:
    """Fill `out` (batch, dt_rank + 2 * d_state) with [dt, B, C], before any bias or norm.

    Args:
        x: (batch, d_inner) after the convolution, unit stride along a row.
        weight: (dt_rank + 2 * d_state, d_inner), contiguous.
        out: float32 keeps the sums as they are; MANY_ROWS and more of the weight's dtype are multiplied
            by the library.
    """
    batch, d_inner = x.shape
    rows = weight.shape[0]
    check_shape("weight", weight, (rows, d_inner))
    check(weight.is_contiguous(), "weight", "a contiguous tensor", f"strides {weight.stride()}")
    check_rows("x", x, (batch, d_inner))
    check_rows("out", out, (batch, rows))
    check_device(out.device, x=x, weight=weight)
    if backend_for(out.device) != "triton":
        decode_mamba1_torch.x_proj_step(x, weight, out)
    elif config is None and batch >= MANY_ROWS and x.dtype == weight.dtype == out.dtype:
        _multiply(x, weight, out)
    else:
        from mamba_kernels.decode_mamba1_triton import launch_x_proj

        launch_x_proj(x, weight, out, pdl=pdl, config=config)


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
    norm_eps: float | None = None,
    dt: torch.Tensor | None = None,
    state_batch_indices: torch.Tensor | None = None,
    pdl: bool = False,
    config: dict[str, Any] | None = None,
) -> Normed:
    """Advance the recurrence by one token and gate its output.

    Args:
        xz: (batch, 2 * d_inner), x after the convolution, then z.
        dtBC: (batch, dt_rank + 2 * d_state), what x_proj_step made.
        ssm_state: (slots, d_inner, d_state), advanced in place; any strides.
        dt_weight: (d_inner, dt_rank), contiguous. dt_bias: (d_inner,). dt = softplus(dt_weight dt + dt_bias).
        A: (d_inner, d_state), negative. D: (d_inner,).
        out: (batch, d_inner), filled with the gated output.
        norm_eps: FalconMamba's epsilon of the RMS norms of dt, B and C, without weights; None: no norms.
        dt: (batch, d_inner) in the dtype of dtBC and dt_weight: the work area of the library's product, for
            many rows. None: the kernel multiplies.
        state_batch_indices: (batch,) integers, the slot that each row of the batch advances; none twice.
            Negative is padding: no state changes, the output is zero. Default: row b has slot b.

    Returns:
        `out` as the `Normed` that out_proj_step reads; nothing normalises it.
    """
    batch = xz.shape[0]
    _, d_inner, d_state = ssm_state.shape
    dt_rank = dt_weight.shape[1]
    check_rows("xz", xz, (batch, 2 * d_inner))
    check_rows("dtBC", dtBC, (batch, dt_rank + 2 * d_state))
    check_shape("dt_weight", dt_weight, (d_inner, dt_rank))
    for name, tensor, shape in (
        ("dt_bias", dt_bias, (d_inner,)), ("A", A, (d_inner, d_state)), ("D", D, (d_inner,)),
    ):  # fmt: skip
        check_shape(name, tensor, shape)
    for name, tensor in (("dt_weight", dt_weight), ("dt_bias", dt_bias), ("A", A), ("D", D)):
        check(tensor.is_contiguous(), name, "a contiguous tensor", f"strides {tensor.stride()}")
    check_rows("out", out, (batch, d_inner))
    check_slots(state_batch_indices, batch, "ssm_state", ssm_state)
    if dt is not None:
        check_rows("dt", dt, (batch, d_inner))
        for name, tensor in (("dt", dt), ("dtBC", dtBC)):
            expected = f"{dt_weight.dtype}, for the library's product"
            check(tensor.dtype == dt_weight.dtype, name, expected, tensor.dtype)
    check_device(
        xz.device, dtBC=dtBC, ssm_state=ssm_state, dt_weight=dt_weight, dt_bias=dt_bias, A=A, D=D, out=out,
        dt=dt, state_batch_indices=state_batch_indices,
    )  # fmt: skip
    if backend_for(xz.device) == "triton":
        from mamba_kernels.decode_mamba1_triton import launch_mamba1_ssm_step

        if dt is not None:
            _multiply(dtBC[:, :dt_rank], dt_weight, dt)
        launch_mamba1_ssm_step(
            xz, dtBC, dt, ssm_state, dt_weight, dt_bias, A, D, out,
            norm_eps=norm_eps, slots=state_batch_indices, pdl=pdl, config=config,
        )  # fmt: skip
    else:
        decode_mamba1_torch.mamba1_ssm_step(
            xz, dtBC, ssm_state, dt_weight, dt_bias, A, D, out,
            norm_eps=norm_eps, state_batch_indices=state_batch_indices,
        )  # fmt: skip
    return Normed(out, None, 0.0)


@torch.no_grad()  # a product into a buffer has no gradient
def _multiply(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """out (batch, rows) = x (batch, width) @ weight.T."""
    torch.mm(x, weight.T, out=out)
