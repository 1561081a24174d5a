"""The chain of the decode step's kernels against the model's equations."""

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F

from decode_testing import EPS, HALF_TYPES, Shape, cast, randn, random_normed
from kernel_testing import assert_close_as_reference
from mamba_kernels.backend import use_backend
from mamba_kernels.decode_layer import (
    embed_step,
    in_proj_step,
    lm_head_step,
    normalise_step,
    out_proj_step,
    ssm_step,
)
from mamba_kernels.decode_norm import NormBuffers, normalise


@dataclass(frozen=True)
class Layer:
    norm: torch.Tensor
    in_proj: torch.Tensor
    conv_weight: torch.Tensor
    conv_bias: torch.Tensor
    dt_bias: torch.Tensor
    A_log: torch.Tensor
    D: torch.Tensor
    gated_norm: torch.Tensor
    out_proj: torch.Tensor


@dataclass(frozen=True)
class Model:
    embedding: torch.Tensor
    layers: list[Layer]
    final_norm: torch.Tensor


def model(shape, layers, device, dtype=torch.float32, vocabulary=31):
    """Random weights of a plain Mamba-2 model with tied embeddings."""

    def weight(*size, seed):
        return (randn(*size, seed=seed) / size[-1] ** 0.5).to(device, dtype)

    def layer(i):
        return Layer(
            norm=weight(shape.d_model, seed=10 * i),
            in_proj=weight(shape.rows, shape.d_model, seed=10 * i + 1),
            conv_weight=weight(shape.conv_dim, shape.d_conv, seed=10 * i + 2),
            conv_bias=weight(shape.conv_dim, seed=10 * i + 3),
            dt_bias=weight(shape.nheads, seed=10 * i + 4),
            A_log=weight(shape.nheads, seed=10 * i + 5),
            D=weight(shape.nheads, seed=10 * i + 6),
            gated_norm=weight(shape.d_ssm, seed=10 * i + 7),
            out_proj=weight(shape.d_model, shape.d_ssm, seed=10 * i + 8),
        )

    return Model(
        weight(vocabulary, shape.d_model, seed=-1),
        [layer(i) for i in range(layers)],
        weight(shape.d_model, seed=-2),
    )


def logits_by_equations(net, shape, tokens):
    """Logits (batch, seqlen, vocabulary) of tokens (batch, seqlen) by the model's definition, row by row."""

    def rms_norm(x, weight):
        return x * torch.rsqrt(x.square().mean() + EPS) * weight

    rows = []
    for row in tokens:
        conv = [torch.zeros(shape.d_conv, shape.conv_dim).double() for _ in net.layers]
        ssm = [torch.zeros(shape.nheads, shape.headdim, shape.d_state).double() for _ in net.layers]
        for token in row:
            hidden = net.embedding[token]
            for i, w in enumerate(net.layers):
                projected = w.in_proj @ rms_norm(hidden, w.norm)
                z, xBC, dt = projected.split([shape.d_ssm, shape.conv_dim, shape.nheads])
                conv[i] = torch.cat([conv[i][1:], xBC[None]])
                xBC = F.silu((conv[i] * w.conv_weight.T).sum(0) + w.conv_bias)
                bc = shape.ngroups * shape.d_state
                x, B, C = xBC.split([shape.d_ssm, bc, bc])
                dt = F.softplus(dt + w.dt_bias)
                y = []
                for h in range(shape.nheads):
                    g = slice(h // (shape.nheads // shape.ngroups) * shape.d_state, None)
                    x_h = x[h * shape.headdim :][: shape.headdim]
                    B_h, C_h = B[g][: shape.d_state], C[g][: shape.d_state]
                    decay = torch.exp(-torch.exp(w.A_log[h]) * dt[h])
                    ssm[i][h] = decay * ssm[i][h] + dt[h] * torch.outer(x_h, B_h)
                    y.append(ssm[i][h] @ C_h + w.D[h] * x_h)
                gated = (torch.cat(y) * F.silu(z)).chunk(shape.ngroups)
                weights = w.gated_norm.chunk(shape.ngroups)
                normed = torch.cat([rms_norm(u, v) for u, v in zip(gated, weights, strict=True)])
                hidden = hidden + w.out_proj @ normed
            rows.append(net.embedding @ rms_norm(hidden, net.final_norm))
    return torch.stack(rows).unflatten(0, tokens.shape)


def decode(net, shape, tokens, backend, device, dtype, pdl=False, whole=False):
    """The same logits from the decode step's functions, token by token, of rows in two factors or whole."""
    batch = tokens.shape[0]
    conv = [torch.zeros(batch, shape.conv_dim, shape.d_conv, dtype=dtype, device=device) for _ in net.layers]
    state = (batch, shape.nheads, shape.headdim, shape.d_state)
    ssm = [torch.zeros(state, dtype=dtype, device=device) for _ in net.layers]
    residual = torch.empty(batch, shape.d_model, dtype=dtype, device=device)
    row = torch.empty(batch, shape.rows, dtype=dtype, device=device)
    stream = NormBuffers.empty(batch, shape.d_model, dtype, device)
    if whole:
        stream = NormBuffers(stream.scaled, None)
    product = torch.empty_like(stream.scaled)
    gated = NormBuffers.empty(batch, shape.d_ssm, dtype, device)
    gated_rows = torch.empty_like(gated.scaled)
    logits = torch.empty(tokens.shape[1], batch, net.embedding.shape[0], dtype=dtype, device=device)
    norms = [w.norm for w in net.layers] + [net.final_norm]
    with use_backend(backend):
        for t in range(tokens.shape[1]):
            normed = embed_step(tokens[:, t].to(device), net.embedding, norms[0], EPS, residual, stream)
            for w, conv_state, ssm_state, next_norm in zip(net.layers, conv, ssm, norms[1:], strict=True):
                in_proj_step(
                    normed, w.in_proj, None, conv_state, w.conv_weight, w.conv_bias, row, d_ssm=shape.d_ssm,
                    pdl=pdl,
                )  # fmt: skip
                normed = ssm_step(
                    row, ssm_state, w.dt_bias, w.A_log, w.D, w.gated_norm, EPS, gated,
                    ngroups=shape.ngroups, pdl=pdl,
                )  # fmt: skip
                if whole and shape.ngroups > 1:
                    normed = normalise_step(normed, gated_rows, pdl=pdl)
                normed = out_proj_step(
                    normed, w.out_proj, None, residual, next_norm, EPS, stream, product=product, pdl=pdl
                )
            lm_head_step(normed, net.embedding, logits[t], pdl=pdl)
    return logits.transpose(0, 1)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("ngroups", [1, 2, 4])
def test_the_chain_in_float64_is_the_model(ngroups, whole):
    shape = Shape(ngroups=ngroups)
    tokens = torch.randint(0, 31, (shape.batch, 6), generator=torch.Generator().manual_seed(0))
    net = model(shape, layers=2, device="cpu", dtype=torch.float64)
    logits = decode(net, shape, tokens, "torch", "cpu", torch.float64, whole=whole)
    torch.testing.assert_close(logits, logits_by_equations(net, shape, tokens), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF_TYPES])
@pytest.mark.parametrize(
    "shape, layers, whole",
    [
        (Shape(), 2, False),
        (Shape(batch=1, ngroups=1), 1, False),
        (Shape(batch=9, nheads=2), 1, False),
        (Shape(batch=9, ngroups=1), 2, True),
        (Shape(batch=17, nheads=2), 1, True),
    ],
)
def test_the_chain_of_kernels_follows_the_model(device, nan_filled_empty, shape, layers, whole, dtype):
    tokens = torch.randint(0, 31, (shape.batch, 2), generator=torch.Generator().manual_seed(0))
    net = model(shape, layers, device=device, dtype=dtype)
    rounded = [replace(w, **{k: v.double() for k, v in vars(w).items()}) for w in net.layers]
    wide = Model(net.embedding.double(), rounded, net.final_norm.double())
    ref64 = decode(wide, shape, tokens, "torch", device, torch.float64)
    ref = decode(net, shape, tokens, "torch", device, dtype)
    ours = decode(net, shape, tokens, "triton", device, dtype, whole=whole)
    assert_close_as_reference(ours, ref64, ref)


@pytest.mark.gpu
@pytest.mark.parametrize("batch, whole", [(1, False), (4, False), (24, False), (70, False), (24, True)])
def test_early_starts_change_no_bit(batch, whole):
    shape = Shape(batch=batch, d_model=256, nheads=8, headdim=64, d_state=64)
    tokens = torch.randint(0, 31, (batch, 8), generator=torch.Generator().manual_seed(0))
    net = model(shape, layers=4, device="cuda", dtype=torch.bfloat16)
    runs = [
        decode(net, shape, tokens, "triton", "cuda", torch.bfloat16, pdl, whole)
        for pdl in (False, True, True)
    ]
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_padding_rows_change_no_state_and_give_zero(device, backend):
    shape = Shape(batch=2)
    slots = torch.tensor([-1, 2], dtype=torch.int32, device=device)
    conv_state = randn(3, shape.conv_dim, shape.d_conv, seed=1).float().to(device)
    ssm_state = randn(3, shape.nheads, shape.headdim, shape.d_state, seed=2).float().to(device)
    before = conv_state.clone(), ssm_state.clone()
    parameters = model(shape, layers=1, device=device).layers[0]
    out = torch.empty(2, shape.rows, device=device)
    gated = NormBuffers.empty(2, shape.d_ssm, torch.float32, device)
    with use_backend(backend):
        in_proj_step(
            cast(random_normed(2, shape.d_model, 1, seed=3), torch.float32, device),
            parameters.in_proj, None, conv_state, parameters.conv_weight, None, out,
            d_ssm=shape.d_ssm, state_batch_indices=slots,
        )  # fmt: skip
        normed = ssm_step(
            out, ssm_state, parameters.dt_bias, parameters.A_log, parameters.D, parameters.gated_norm, EPS,
            gated, ngroups=shape.ngroups, state_batch_indices=slots,
        )  # fmt: skip
    for state, old in zip((conv_state, ssm_state), before, strict=True):
        assert torch.equal(state[:2], old[:2])
        assert not torch.equal(state[2], old[2])
    assert (normalise(normed)[0] == 0).all() and (normalise(normed)[1] != 0).any()


def test_no_program_of_the_residual_has_more_threads_than_columns():
    # Where two warps hold a column, one may read it again after the other has updated it.
    from mamba_kernels.decode_norm_triton import residual_warps

    assert all(32 * residual_warps(block) <= max(32, block) for block in (1, 16, 32, 64, 128, 4096, 8192))
