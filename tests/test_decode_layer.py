"""The decode step's kernels beside its projections, each against the torch version."""

import itertools

import pytest
import torch

from decode_testing import (
    EPS,
    HALF_TYPES,
    Shape,
    check_triton,
    normed_out,
    randn,
    random_normed,
    rows_out,
)
from mamba_kernels.backend import use_backend
from mamba_kernels.decode_layer import embed_step, normalise_step, ssm_step
from mamba_kernels.decode_norm import NormBuffers


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


def test_no_program_of_the_recurrence_has_more_threads_than_elements():
    # Where two warps hold an element, one may read it again after the other has updated it.
    from mamba_kernels.decode_ssm_triton import config_for

    for batch, headdim, d_state in itertools.product((1, 40, 200, 3000), (1, 2, 4, 64), (1, 4, 8, 16, 128)):
        config = config_for(batch, 1, headdim, d_state)
        assert config["num_warps"] == 1 or 32 * config["num_warps"] <= config["BLOCK_P"] * d_state
