"""What the tests of the decode step share: shapes, random inputs, a kernel compared with torch."""

from dataclasses import dataclass

import pytest
import torch

from kernel_testing import assert_close_as_reference
from mamba_kernels.backend import use_backend
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


def whole(batch, width, seed):
    """Rows that are normalised, as a product of many rows takes them."""
    return Normed(randn(batch, width, seed=seed), None, EPS)
