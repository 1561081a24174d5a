"""One token through a Mamba-2 model, in three to five kernels a layer, for decoding in a CUDA graph.

    embed_step                                       residual = embedding[token]
    for each layer:
        in_proj_step     [z, x, B, C, dt] = in_proj(norm(residual)); x, B, C = silu(conv1d(x, B, C))
        ssm_step         h = exp(dt A) h + dt x B;  y = C h + D x;  u = y silu(z)
        out_proj_step    residual += out_proj(gated norm of y, z)
    lm_head_step                                     logits = lm_head(norm(residual))

(Mamba-2, https://arxiv.org/abs/2405.21060, section 7 and figure 6, right.)

With our own products a normalised row travels between them in two factors, as a `Normed` (see
decode_norm), and each line above is one kernel. With the library's, from `library_rows` on, their ends, the
convolution and the residual with the next norm, are kernels of their own. The caller chooses by the
`NormBuffers` it gives to embed_step and out_proj_step: without `squares` rows are normalised whole, and rows
that are whole and of the weight's dtype are multiplied by the library.

A state in few bits is advanced by `packed_ssm_step` in place of ssm_step, which needs a kernel more, or none
behind the library's product: see `Preparation`.

Every function writes into buffers of its caller and neither allocates nor waits for the device, so that the
chain can be captured. `pdl=True` lets each kernel load its weights and its layer's state while the kernel
before it still runs; it asks that no kernel since this token's `embed_step` has written them.

Shapes: d_ssm = nheads * headdim; conv_dim = d_ssm + 2 * ngroups * d_state; rows of in_proj are
[z, x, B, C, dt]. Activations and weights are float32, bfloat16 or float16; where they are float16, give
float32 buffers for `scaled`, which is not normalised yet and can pass 65504.
"""

from typing import Any

import torch

from mamba_kernels import decode_layer_torch
from mamba_kernels.backend import backend_for
from mamba_kernels.checks import check, check_device, check_rows, check_shape, check_slots
from mamba_kernels.decode_norm import NormBuffers, Normed, normalise
from mamba_kernels.packed_ssm_step import Preparation, check_preparation

# Rows of a batch from which on the library's products are faster than ours on the ordinary cores.
MANY_ROWS = 9
# The same for ours on the tensor cores, in a Mamba-2 layer of 16-bit weights: up to this d_model, and above.
LIBRARY_ROWS = 129
WIDE, LIBRARY_ROWS_WIDE = 1536, 9


def library_rows(d_model: int, dtype: torch.dtype) -> int:
    """Rows of a batch from which on a Mamba-2 layer is faster with the library's products (on an H200)."""
    if dtype.itemsize > 2:  # as float32 our products would not run on the tensor cores
        return MANY_ROWS
    return LIBRARY_ROWS if d_model <= WIDE else LIBRARY_ROWS_WIDE


def embed_step(
    token_ids: torch.Tensor,
    embedding: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor,
    out: NormBuffers,
) -> Normed:
    """Start a token: fill `residual` (batch, d_model) with its embedding, and normalise for layer 0.

    Args:
        token_ids: (batch,) integers below the rows of `embedding`, which is not checked on a GPU.
        embedding: (vocabulary rows, d_model). norm_weight: (d_model,), the first layer's.
    """
    batch, width = residual.shape
    check_shape("token_ids", token_ids, (batch,))
    check_shape("embedding", embedding, (embedding.shape[0], width))
    _check_next(residual, norm_weight, out)
    check_device(residual.device, token_ids=token_ids, embedding=embedding)
    if backend_for(residual.device) == "triton":
        from mamba_kernels.decode_norm_triton import launch_embed

        parts = launch_embed(token_ids, embedding, norm_weight, eps, residual, *out)
        return out.used(parts, 1, eps)
    return decode_layer_torch.embed_step(token_ids, embedding, norm_weight, eps, residual, out)


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
    prepare: Preparation | None = None,
    pdl: bool = False,
    config: dict[str, Any] | None = None,
) -> None:
    """Project a token to [z, x, B, C, dt] and put x, B, C through the causal convolution and SiLU.

    d_ssm is where x begins: 0 serves Mamba-1, whose rows are [x, z] and whose convolution is of x alone.

    Args:
        weight: (2 * d_ssm + 2 * ngroups * d_state + nheads, d_model), contiguous. bias: its rows.
        conv_state: (slots, conv_dim, d_conv), newest column last, any strides; moved on in place.
        conv_weight: (conv_dim, d_conv), contiguous. conv_bias: (conv_dim,).
        out: (batch, rows of weight), unit stride along a row.
        state_batch_indices: as for `ssm_step`.
        prepare: arguments of this token's `packed_ssm_step`, which is then called with `prepared=True`, the
            same arguments and slots, next of all that uses its state. It is prepared here, in the kernel
            that convolves or behind it, where kernels are Triton's.
    """
    rows, batch = weight.shape[0], normed.scaled.shape[0]
    _, conv_dim, d_conv = conv_state.shape
    _check_linear(normed, weight, bias)
    check(d_ssm + conv_dim <= rows, "conv_state", f"at most {rows - d_ssm} channels", conv_dim)
    check_shape("conv_weight", conv_weight, (conv_dim, d_conv))
    check(conv_weight.is_contiguous(), "conv_weight", "a contiguous tensor", conv_weight.stride())
    check_shape("conv_bias", conv_bias, (conv_dim,))
    check_rows("out", out, (batch, rows))
    check_slots(state_batch_indices, batch, "conv_state", conv_state)
    check_device(
        out.device, conv_state=conv_state, conv_weight=conv_weight, conv_bias=conv_bias,
        state_batch_indices=state_batch_indices,
    )  # fmt: skip
    if prepare is not None:
        check_preparation(prepare, out, d_ssm, conv_dim, state_batch_indices)
    if backend_for(out.device) == "triton":
        from mamba_kernels.decode_conv_triton import Convolution, launch_convolve
        from mamba_kernels.decode_linear_triton import launch_linear

        conv = Convolution(conv_state, conv_weight, conv_bias, state_batch_indices, d_ssm)
        if config is None and _is_product(normed, weight, out):
            _multiply(normed.scaled, weight, bias, out)
            if prepare is None:
                launch_convolve(out, conv, pdl)
            else:
                from mamba_kernels.packed_convolution_triton import launch_convolve_and_prepare

                launch_convolve_and_prepare(out, conv, prepare, pdl)
        else:
            launch_linear(normed, weight, bias, out, conv, pdl=pdl, config=config)
            if prepare is not None:
                from mamba_kernels.packed_prepare_triton import launch_prepare

                launch_prepare(out, prepare, state_batch_indices, pdl)
    else:
        decode_layer_torch.in_proj_step(
            normed, weight, bias, conv_state, conv_weight, conv_bias, out,
            d_ssm=d_ssm, state_batch_indices=state_batch_indices,
        )  # fmt: skip


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
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    norm_before_gate: bool = False,
    state_batch_indices: torch.Tensor | None = None,
    pdl: bool = False,
    config: dict[str, Any] | None = None,
) -> Normed:
    """Advance the recurrence by one token and gate its output.

    Args:
        zxbcdt: (batch, 2 * d_ssm + 2 * ngroups * d_state + nheads), x, B, C after the convolution.
        ssm_state: (slots, nheads, headdim, d_state), advanced in place; any strides.
        dt_bias, A_log: (nheads,). D: (nheads,) or (nheads, headdim). dt = softplus(dt + dt_bias), clamped
            to dt_limit; A = -exp(A_log).
        norm_weight: (d_ssm,) of the grouped norm, of y * silu(z), or of y alone where norm_before_gate
            (then times silu(z)); None: no norm.
        state_batch_indices: (batch,) integers, the slot that each row of the batch advances; none twice.
            Negative is padding: no state changes, the output is zero. Default: row b has slot b.

    Returns:
        The gated output, normalised, with out.scaled as (batch, d_ssm).
    """
    batch = zxbcdt.shape[0]
    _, nheads, headdim, d_state = ssm_state.shape
    d_ssm = nheads * headdim
    check(ngroups > 0 and nheads % ngroups == 0, "ngroups", f"a divisor of {nheads} heads", ngroups)
    check_rows("zxbcdt", zxbcdt, (batch, 2 * d_ssm + 2 * ngroups * d_state + nheads))
    check_shape("dt_bias", dt_bias, (nheads,))
    check_shape("A_log", A_log, (nheads,))
    check_shape("D", D, (nheads,) if D.dim() == 1 else (nheads, headdim))
    check_shape("norm_weight", norm_weight, (d_ssm,))
    check(norm_weight is None or out.squares is not None, "out.squares", "sums of the norm", None)
    _check_buffers(out, (batch, d_ssm))
    check_slots(state_batch_indices, batch, "ssm_state", ssm_state)
    check_device(
        zxbcdt.device, ssm_state=ssm_state, dt_bias=dt_bias, A_log=A_log, D=D, norm_weight=norm_weight,
        scaled=out.scaled, squares=out.squares, state_batch_indices=state_batch_indices,
    )  # fmt: skip
    if backend_for(zxbcdt.device) == "triton":
        from mamba_kernels.decode_ssm_triton import launch_ssm_step

        parts = launch_ssm_step(
            zxbcdt, ssm_state, dt_bias, A_log, D, norm_weight, *out, ngroups=ngroups, dt_limit=dt_limit,
            norm_before_gate=norm_before_gate, slots=state_batch_indices, pdl=pdl, config=config,
        )  # fmt: skip
        return Normed(out.scaled, None, eps) if norm_weight is None else out.used(parts, ngroups, eps)
    return decode_layer_torch.ssm_step(
        zxbcdt, ssm_state, dt_bias, A_log, D, norm_weight, eps, out, ngroups=ngroups, dt_limit=dt_limit,
        norm_before_gate=norm_before_gate, state_batch_indices=state_batch_indices,
    )  # fmt: skip


def normalise_step(normed: Normed, out: torch.Tensor, *, pdl: bool = False) -> Normed:
    """Fill `out` (batch, width) with the normalised rows, and return them as a `Normed`.

    For the library's product of a grouped norm, or in float16.
    """
    check_rows("out", out, tuple(normed.scaled.shape))
    _check_groups(normed)
    check_device(out.device, scaled=normed.scaled, squares=normed.squares)
    if backend_for(out.device) == "triton":
        from mamba_kernels.decode_norm_triton import launch_normalise

        launch_normalise(normed, out, pdl)
    else:
        out.copy_(normalise(normed))
    return Normed(out, None, normed.eps)


def out_proj_step(
    normed: Normed,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    out: NormBuffers,
    *,
    product: torch.Tensor | None = None,
    pdl: bool = False,
    config: dict[str, Any] | None = None,
) -> Normed:
    """End a layer: residual += out_proj(normed), in place, and normalise it for what comes next.

    Args:
        weight: (d_model, d_ssm), contiguous. bias: (d_model,). residual: (batch, d_model), float32 or the
            model's dtype.
        norm_weight, eps: of the next layer's norm, or of the last norm after the last layer.
        out: without squares, rows are multiplied by the library and normalised whole; `normed` is then of
            the weight's dtype and of one group, or whole.
        product: (batch, d_model) in the weight's dtype, the work area of that.
    """
    batch, width = residual.shape
    _check_linear(normed, weight, bias)
    check(weight.shape[0] == width, "weight", f"{width} rows", weight.shape[0])
    _check_next(residual, norm_weight, out)
    if backend_for(residual.device) == "triton" and out.squares is None:
        from mamba_kernels.decode_norm_triton import launch_residual

        check(product is not None, "product", "a work area, for whole rows", None)
        check_rows("product", product, (batch, width))
        groups = 1 if normed.squares is None else normed.squares.shape[1]
        check(groups == 1, "normed", "one group of squares, for whole rows", groups)
        for name, tensor in (("normed", normed.scaled), ("product", product)):
            check(tensor.dtype == weight.dtype, name, f"{weight.dtype}, for whole rows", tensor.dtype)
        check_device(weight.device, product=product, residual=residual)
        _multiply(normed.scaled, weight, None, product)
        launch_residual(normed, product, bias, residual, norm_weight, eps, out.scaled, pdl)
        return Normed(out.scaled, None, eps)
    if backend_for(residual.device) == "triton":
        from mamba_kernels.decode_linear_triton import Residual, launch_linear

        target = Residual(residual, norm_weight, *out)
        parts = launch_linear(normed, weight, bias, None, residual=target, pdl=pdl, config=config)
        return out.used(parts, 1, eps)
    return decode_layer_torch.out_proj_step(normed, weight, bias, residual, norm_weight, eps, out)


def lm_head_step(
    normed: Normed,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    pdl: bool = False,
    config: dict[str, Any] | None = None,
) -> None:
    """Fill `out` (batch, vocabulary rows) with logits; weight (vocabulary rows, d_model), contiguous."""
    _check_linear(normed, weight, None)
    check_rows("out", out, (normed.scaled.shape[0], weight.shape[0]))
    check_device(out.device, weight=weight)
    if backend_for(out.device) == "triton":
        from mamba_kernels.decode_linear_triton import launch_linear

        if config is None and _is_product(normed, weight, out):
            _multiply(normed.scaled, weight, None, out)
        else:
            launch_linear(normed, weight, None, out, pdl=pdl, config=config)
    else:
        decode_layer_torch.lm_head_step(normed, weight, out)


def _is_product(normed: Normed, weight: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether a projection of `normed` is a plain matrix product, which scales and converts nothing."""
    return normed.squares is None and normed.scaled.dtype == weight.dtype == out.dtype


@torch.no_grad()  # a product into a buffer has no gradient
def _multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """out (batch, rows) = x (batch, width) @ weight.T + bias."""
    if bias is None:
        torch.mm(x, weight.T, out=out)
    else:
        torch.addmm(bias, x, weight.T, out=out)


def _check_linear(normed: Normed, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    scaled, squares, _ = normed
    check_shape("weight", weight, (weight.shape[0], scaled.shape[1]))
    check(weight.is_contiguous(), "weight", "a contiguous tensor", f"strides {weight.stride()}")
    check_shape("bias", bias, (weight.shape[0],))
    check_device(weight.device, scaled=scaled, squares=squares, bias=bias)
    _check_groups(normed)


def _check_groups(normed: Normed) -> None:
    scaled, squares, _ = normed
    if squares is not None:
        check(
            scaled.shape[1] % squares.shape[1] == 0,
            "squares", f"a number of groups that divides {scaled.shape[1]}", squares.shape[1],
        )  # fmt: skip


def _check_next(residual: torch.Tensor, norm_weight: torch.Tensor, out: NormBuffers) -> None:
    batch, width = residual.shape
    check_shape("norm_weight", norm_weight, (width,))
    check_rows("residual", residual, (batch, width))
    _check_buffers(out, (batch, width))
    check_device(residual.device, norm_weight=norm_weight, scaled=out.scaled, squares=out.squares)


def _check_buffers(out: NormBuffers, shape: tuple[int, int]) -> None:
    check_rows("out.scaled", out.scaled, shape)
    if out.squares is not None:
        check_rows("out.squares", out.squares, shape)
