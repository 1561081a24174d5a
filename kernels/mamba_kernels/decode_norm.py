"""An RMS-normalised row in two factors, which the kernels of the decode step pass to each other.

An RMS norm needs a whole row before it can give any of it, which would cost a kernel of its own. A `Normed`
is made one tile at a time: the row times the norm's weight, and partial sums of the row's squares. The
projection that reads it scales its sums by 1/RMS, as W (x * w / rms(x)) = (W (x * w)) / rms(x).

A library's product scales nothing: where many rows are multiplied by one, they are normalised whole, which
a batch of them has programs enough for.
"""

from typing import NamedTuple

import torch


class Normed(NamedTuple):
    """RMS-normalised rows in two factors: scaled * rsqrt(squares.sum(-1) / group size + eps).

    scaled: (batch, width). squares: (batch, ngroups, parts) float32, or None where `scaled` is all there
    is: the row is normalised already, or there is no norm.
    """

    scaled: torch.Tensor
    squares: torch.Tensor | None
    eps: float


class NormBuffers(NamedTuple):
    """Where a `Normed` is written: scaled and squares (batch, width), squares in float32.

    A kernel writes one sum of squares a tile, so width of them is room enough whatever its tiles are.
    squares None: rows are to be normalised whole.
    """

    scaled: torch.Tensor
    squares: torch.Tensor | None

    @classmethod
    def empty(cls, batch: int, width: int, dtype: torch.dtype, device: torch.device) -> "NormBuffers":
        """Buffers for rows of `width` in two factors."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return cls(
            torch.empty(batch, width, dtype=dtype, device=device),
            torch.empty(batch, width, dtype=wide, device=device),
        )

    def used(self, parts: int, ngroups: int, eps: float) -> Normed:
        """The `Normed` of which `parts` partial sums a row were written, the groups one after the other."""
        if self.squares is None:
            return Normed(self.scaled, None, eps)
        return Normed(self.scaled, self.squares[:, :parts].unflatten(1, (ngroups, -1)), eps)


def normalise(normed: Normed) -> torch.Tensor:
    """The normalised rows (batch, width) themselves, in float32, or in float64 if they are float64."""
    scaled = normed.scaled if normed.scaled.dtype == torch.float64 else normed.scaled.float()
    if normed.squares is None:
        return scaled
    group_size = scaled.shape[1] // normed.squares.shape[1]
    scale = torch.rsqrt(normed.squares.sum(-1) / group_size + normed.eps)
    return scaled * scale.repeat_interleave(group_size, dim=1)


def fill_normed(x: torch.Tensor, norm_weight: torch.Tensor, eps: float, out: NormBuffers) -> Normed:
    """Make the `Normed` of rows x (batch, width), in one part."""
    wide = x if x.dtype == torch.float64 else x.float()
    scaled = wide * norm_weight.to(wide.dtype)
    if out.squares is None:
        scaled = scaled * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    else:
        out.squares[:, 0] = wide.square().sum(-1)
    out.scaled.copy_(scaled)
    return out.used(1, 1, eps)
