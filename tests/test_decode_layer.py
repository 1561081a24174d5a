"""The decode step's kernels, each against the torch version, and the whole chain against plain equations."""

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F

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
from mamba_kernels.decode_norm import NormBuffers, Normed, normalise

EPS = 1e-5
HALF_TYPES = [
    pytest.param(torch.bfloat16, marks=pytest.mark.gpu),
    pytest.param(torch.float16, marks=pytest.mark.gpu),
]


@dataclass(frozen=True)
class Shape:
    batch: int = 2
    d_model: int = 24
    nheads: int = 4
    headdim: int = 8
    d_state: int = 16
    ngroups: int = 2
    d_conv: int = 4

    @property
    def d_ssm(self):
        return self.nheads * self.headdim

    @property
    def conv_dim(self):
        return self.d_ssm + 2 * self.ngroups * self.d_state

    @property
    def rows(self):
        return self.d_ssm + self.conv_dim + self.nheads


def randn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_normed(batch, width, ngroups, seed, parts=3):
    """A Normed whose squares are split in uneven parts; large, as it is not normalised yet."""
    x = 30 * randn(batch, width, seed=seed)
    squares = (
        x.square().unflatten(1, (ngroups, -1)).sum(-1, keepdim=True) * torch.tensor([0.5, 0.3, 0.2])[:parts]
    )
    return Normed(x * randn(width, seed=seed + 1), squares, EPS)


def cast(value, dtype, device):
    """Tensors inside `value` as `dtype` on `device`; sums of squares are float32 at least, integers stay."""
    if isinstance(value, Normed):
        squares = value.squares
        if squares is not None:
            squares = squares.to(device, torch.float64 if dtype == torch.float64 else torch.float32)
        return Normed(cast(value.scaled, dtype, device), squares, value.eps)
    if isinstance(value, torch.Tensor):
        return value.to(device, dtype if value.is_floating_point() else value.dtype, copy=True)
    return value


def check_triton(step, args, in_place, dtype, device, make_out, **options):
    """Run `step` in float64 and in `dtype` on torch, and in `dtype` on Triton; compare all it writes.

    make_out(dtype, device): the buffers of the step, passed as `out`; in_place: arguments that it changes.
    """
    results = []
    for backend, kind in (("torch", torch.float64), ("torch", dtype), ("triton", dtype)):
        out = make_out(kind, device)
        given = {name: cast(value, kind, device) for name, value in args.items()}
        given.update(options if backend == "triton" else {})
        with use_backend(backend):
            returned = step(**given, out=out)
        written = {name: given[name] for name in in_place}
        written["out"] = out if isinstance(out, torch.Tensor) else normalise(returned)
        results.append(written)
    ref64, ref, ours = results
    for name in ours:
        assert_close_as_reference(ours[name], ref64[name], ref[name])


def rows_out(batch, width):
    return lambda dtype, device: torch.empty(batch, width, dtype=dtype, device=device)


def normed_out(batch, width):
    return lambda dtype, device: NormBuffers.empty(batch, width, dtype, device)


SMALL = {"BLOCK_M": 2, "BLOCK_N": 8, "BLOCK_K": 32, "PREFETCH": 2, "num_warps": 1}
CONFIGS = [pytest.param(None, id="default"), pytest.param(SMALL, id="small")]


@pytest.mark.parametrize("dtype", [torch.float32, *HALF_TYPES])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("width, rows, batch", [(24, 37, 1), (100, 16, 3), (33, 50, 17)])
def test_lm_head(device, nan_filled_empty, width, rows, batch, config, dtype):
    args = dict(normed=random_normed(batch, width, 1, seed=1), weight=randn(rows, width, seed=3) / width**0.5)
    check_triton(lm_head_step, args, [], dtype, device, rows_out(batch, rows), config=config)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF_TYPES])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(
    "shape, biases, slots",
    [
        (Shape(batch=1), True, None),
        (Shape(batch=3, d_model=33, d_conv=3, ngroups=1), False, [4, -1, 0]),
        (Shape(batch=9, d_conv=2, nheads=3, ngroups=3), True, None),
    ],
)
def test_in_proj_with_convolution(device, nan_filled_empty, shape, biases, slots, config, dtype):
    pool = shape.batch if slots is None else 5
    args = dict(
        normed=random_normed(shape.batch, shape.d_model, 1, seed=1),
        weight=randn(shape.rows, shape.d_model, seed=3) / shape.d_model**0.5,
        bias=randn(shape.rows, seed=4) if biases else None,
        conv_state=randn(pool, shape.conv_dim, shape.d_conv, seed=5),
        conv_weight=randn(shape.conv_dim, shape.d_conv, seed=6),
        conv_bias=randn(shape.conv_dim, seed=7) if biases else None,
        d_ssm=shape.d_ssm,
        state_batch_indices=None if slots is None else torch.tensor(slots, dtype=torch.int32),
    )
    make_out = rows_out(shape.batch, shape.rows)
    check_triton(in_proj_step, args, ["conv_state"], dtype, device, make_out, config=config)


def whole(batch, width, seed):
    """Rows that are normalised, as a product of many rows takes them."""
    return Normed(randn(batch, width, seed=seed), None, EPS)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF_TYPES])
@pytest.mark.parametrize(
    "shape, biases, slots",
    [
        (Shape(batch=17, nheads=33), True, None),
        (Shape(batch=3, d_model=33, d_conv=3, ngroups=1), False, [4, -1, 0]),
    ],
)
def test_in_proj_of_whole_rows(device, nan_filled_empty, shape, biases, slots, dtype):
    args = dict(
        normed=whole(shape.batch, shape.d_model, seed=1),
        weight=randn(shape.rows, shape.d_model, seed=3) / shape.d_model**0.5,
        bias=randn(shape.rows, seed=4) if biases else None,
        conv_state=randn(shape.batch if slots is None else 5, shape.conv_dim, shape.d_conv, seed=5),
        conv_weight=randn(shape.conv_dim, shape.d_conv, seed=6),
        conv_bias=randn(shape.conv_dim, seed=7) if biases else None,
        d_ssm=shape.d_ssm,
        state_batch_indices=None if slots is None else torch.tensor(slots, dtype=torch.int32),
    )

    def make_out(dtype, device):  # rows apart, as they are where a row is not whole cache lines
        return torch.empty(shape.batch, shape.rows + 3, dtype=dtype, device=device)[:, : shape.rows]

    check_triton(in_proj_step, args, ["conv_state"], dtype, device, make_out)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF_TYPES])
@pytest.mark.parametrize("normed", ["one group", "whole"])
@pytest.mark.parametrize("width, d_ssm, batch", [(24, 64, 1), (17, 96, 18)])
def test_out_proj_to_whole_rows(device, nan_filled_empty, width, d_ssm, batch, normed, dtype):
    rows = whole(batch, d_ssm, seed=1) if normed == "whole" else random_normed(batch, d_ssm, 1, seed=1)
    args = dict(
        normed=rows,
        weight=randn(width, d_ssm, seed=3) / d_ssm**0.5,
        bias=randn(width, seed=4),
        residual=randn(batch, width, seed=5),
        norm_weight=randn(width, seed=6),
        eps=EPS,
        product=torch.empty(batch, width),
    )

    def make_out(dtype, device):
        return NormBuffers(torch.empty(batch, width, dtype=dtype, device=device), None)

    check_triton(out_proj_step, args, ["residual"], dtype, device, make_out)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF_TYPES])
@pytest.mark.parametrize("width, ngroups, batch", [(24, 1, 1), (99, 3, 5)])
def test_rows_are_normalised_group_by_group(device, nan_filled_empty, width, ngroups, batch, dtype):
    args = dict(normed=random_normed(batch, width, ngroups, seed=1))
    check_triton(normalise_step, args, [], dtype, device, rows_out(batch, width))


@pytest.mark.parametrize("dtype", [torch.float32, *HALF_TYPES])
def test_embedding_in_whole_rows(device, nan_filled_empty, dtype):
    residual = torch.empty(3, 21)
    tokens = torch.tensor([6, 0, 3])
    args = dict(
        token_ids=tokens, embedding=randn(7, 21, seed=1), norm_weight=randn(21, seed=2), eps=EPS,
        residual=residual,
    )  # fmt: skip

    def make_out(dtype, device):
        return NormBuffers(torch.empty(3, 21, dtype=dtype, device=device), None)

    check_triton(embed_step, args, ["residual"], dtype, device, make_out)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF_TYPES])
@pytest.mark.parametrize("norm", ["gate_first", "norm_first", "none"])
@pytest.mark.parametrize(
    "shape, slots",
    [
        (Shape(batch=1, headdim=64, d_state=128, ngroups=1), None),
        (Shape(headdim=17, d_state=33), [3, 0]),
        (Shape(batch=3, headdim=5, d_state=256, ngroups=4), [1, -1, 0]),
    ],
)
def test_recurrence_with_gate(device, nan_filled_empty, shape, slots, norm, dtype):
    pool = shape.batch if slots is None else 5
    args = dict(
        zxbcdt=randn(shape.batch, shape.rows, seed=1),
        ssm_state=randn(pool, shape.nheads, shape.headdim, shape.d_state, seed=2),
        dt_bias=randn(shape.nheads, seed=3),
        A_log=randn(shape.nheads, seed=4),
        D=randn(shape.nheads, *([] if norm == "none" else [shape.headdim]), seed=5),
        norm_weight=None if norm == "none" else randn(shape.d_ssm, seed=6),
        eps=EPS,
        ngroups=shape.ngroups,
        dt_limit=(0.3, 1.1) if norm == "norm_first" else (0.0, float("inf")),
        norm_before_gate=norm == "norm_first",
        state_batch_indices=None if slots is None else torch.tensor(slots, dtype=torch.int32),
    )
    make_out = normed_out(shape.batch, shape.d_ssm)
    check_triton(ssm_step, args, ["ssm_state"], dtype, device, make_out)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF_TYPES])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("width, d_ssm, ngroups, batch", [(24, 64, 1, 1), (17, 96, 3, 3), (40, 60, 2, 18)])
def test_out_proj_with_residual(device, nan_filled_empty, width, d_ssm, ngroups, batch, config, dtype):
    args = dict(
        normed=random_normed(batch, d_ssm, ngroups, seed=1),
        weight=randn(width, d_ssm, seed=3) / d_ssm**0.5,
        bias=randn(width, seed=4),
        residual=randn(batch, width, seed=5),
        norm_weight=randn(width, seed=6),
        eps=EPS,
    )
    options = {"config": config}
    check_triton(out_proj_step, args, ["residual"], dtype, device, normed_out(batch, width), **options)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_a_projection_of_rows_without_norm_scales_nothing(device, weight_dtype, config):
    normed = cast(random_normed(3, 24, 1, seed=1)._replace(squares=None), torch.float32, device)
    normed = normed._replace(scaled=normed.scaled.bfloat16().float())  # exact in either type
    weight = randn(20, 24, seed=2).to(device, weight_dtype)
    out = torch.empty(3, 20, device=device)
    with use_backend("triton"):
        lm_head_step(normed, weight, out, config=config)
    torch.testing.assert_close(out, normed.scaled @ weight.float().T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("ngroups", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights_meet_wider_inputs(device, dtype, ngroups, config):
    """All bit patterns come out of the words they are read as; inputs past float16 are scaled first."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).float()
    weight = torch.where(every.abs() < 1e4, every, 1.0)[torch.randperm(2**16)[: 20 * 48]].view(20, 48)
    normed = cast(random_normed(3, 48, ngroups, seed=1), torch.float32, device)
    normed = normed._replace(scaled=normed.scaled * 1e5, squares=normed.squares * 1e10)
    out = torch.empty(3, 20, device=device)
    with use_backend("triton"):
        lm_head_step(normed, weight.to(device, dtype), out, config=config)
    expected = normalise(cast(normed, torch.float64, device)) @ weight.to(device).double().T
    magnitude = normalise(normed).abs().double() @ weight.to(device).abs().double().T
    assert ((out - expected).abs() <= 4 * torch.finfo(torch.float32).eps * magnitude).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_16_bit_state_keeps_every_element_in_its_place(device, dtype):
    """No input and no decay: the state must come back bit for bit, and the output is its product with C."""
    state = randn(2, 4, 17, 36, seed=1).to(device, dtype)
    shape = Shape(headdim=17, d_state=36)
    row = torch.zeros(2, shape.rows, device=device)
    C = slice(2 * shape.d_ssm + shape.ngroups * shape.d_state, -shape.nheads)
    row[:, C] = torch.randn(2, 72, device=device)
    row[:, : shape.d_ssm] = 1
    before, out = state.clone(), NormBuffers.empty(2, shape.d_ssm, torch.float32, device)
    zeros = torch.zeros(4, device=device)
    with use_backend("triton"):
        ssm_step(row, state, zeros, zeros, zeros, None, EPS, out, ngroups=2, dt_limit=(0.0, 0.0))
    assert torch.equal(state, before)
    expected = torch.einsum(
        "bhpn,bhn->bhp", before.double(), row[:, C].double().view(2, 2, 36).repeat_interleave(2, 1)
    )
    torch.testing.assert_close(
        out.scaled, (expected.flatten(1) * torch.sigmoid(torch.ones(()))).float(), rtol=1e-5, atol=1e-5
    )


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
@pytest.mark.parametrize("batch, whole", [(1, False), (4, False), (24, False), (24, True)])
def test_early_starts_change_no_bit(batch, whole):
    shape = Shape(batch=batch, d_model=256, nheads=8, headdim=64, d_state=64)
    tokens = torch.randint(0, 31, (batch, 8), generator=torch.Generator().manual_seed(0))
    net = model(shape, layers=4, device="cuda", dtype=torch.bfloat16)
    runs = [
        decode(net, shape, tokens, "triton", "cuda", torch.bfloat16, pdl, whole)
        for pdl in (False, True, True)
    ]
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])


def test_an_argument_that_does_not_fit_is_named():
    normed = cast(random_normed(2, 24, 1, seed=1), torch.float32, "cpu")
    out = torch.empty(2, 20)
    with pytest.raises(ValueError, match=r"^weight: expected shape \(20, 24\), got \(20, 23\)"):
        lm_head_step(normed, torch.empty(20, 23), out)
    with pytest.raises(ValueError, match=r"^weight: expected a contiguous tensor"):
        lm_head_step(normed, torch.empty(24, 20).T, out)
    with pytest.raises(ValueError, match=r"^out: expected shape"):
        lm_head_step(normed, torch.empty(21, 24), out)
