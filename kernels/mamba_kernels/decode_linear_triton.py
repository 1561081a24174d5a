"""Launcher of the decode step's projections, y = normalised @ weight.T (+ bias), and what is fused to them.

The kernel ends in one of these epilogues:

    "store"     out = y
    "conv"      the same, but the columns of x, B and C first go through the causal convolution and SiLU
    "residual"  residual += y, and the next `Normed` is made of it
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from mamba_kernels.decode_conv_triton import Convolution
from mamba_kernels.decode_matvec_triton import matvec_kernel
from mamba_kernels.decode_norm import Normed
from mamba_kernels.decode_norm_triton import early_start


def config_for(batch: int, out_features: int, in_features: int, dtype: torch.dtype) -> dict[str, Any]:
    """Block sizes of a projection.

    A program asks for 24 blocks of its rows of the weight, 12 KB a warp, while the kernel ahead still
    runs. 8 rows a program share what is done once for all rows, where they are short or there are very
    many of them; elsewhere 4 rows, to have more of each under way.
    """
    warps = 1 if in_features <= 4096 else 2
    block_k = warps * (512 // dtype.itemsize)
    short = in_features <= 1024 and out_features >= 2048
    rows = 8 if batch > 2 or short or out_features >= 32768 else 4
    return {
        "BLOCK_M": min(8, triton.next_power_of_2(batch)), "BLOCK_N": rows, "BLOCK_K": block_k,
        "PREFETCH": min(triton.cdiv(in_features, block_k), 24 // rows), "num_warps": warps,
    }  # fmt: skip


class Residual(NamedTuple):
    """Operands of the "residual" epilogue; squares (batch, capacity) is filled from its first column."""

    stream: torch.Tensor | None
    norm_weight: torch.Tensor | None
    scaled: torch.Tensor | None
    squares: torch.Tensor | None

    def scalars(self) -> tuple[int, ...]:
        """Strides of a row."""
        return tuple(0 if t is None else t.stride(0) for t in (self.stream, self.scaled, self.squares))


NO_CONVOLUTION = Convolution(None, None, None, None, 0)
NO_RESIDUAL = Residual(None, None, None, None)


def launch_linear(
    normed: Normed,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    conv: Convolution = NO_CONVOLUTION,
    residual: Residual = NO_RESIDUAL,
    *,
    pdl: bool,
    config: dict[str, Any] | None,
) -> int:
    """Run one projection into `out`, or into the residual; return how many parts of squares that filled."""
    scaled, squares, eps = normed
    batch, in_features = scaled.shape
    out_features = weight.shape[0]
    config = config or config_for(batch, out_features, in_features, weight.dtype)
    groups, parts = (0, 0) if squares is None else squares.shape[1:]
    epilogue = "store"
    if conv.state is not None:
        epilogue = "conv"
    elif residual.stream is not None:
        epilogue = "residual"
    packed = weight.dtype.itemsize == 2 and in_features % 2 == 0 and weight.storage_offset() % 2 == 0
    tiles = triton.cdiv(out_features, config["BLOCK_N"])
    with torch.cuda.device_of(scaled):
        matvec_kernel[(tiles, triton.cdiv(batch, config["BLOCK_M"]))](
            scaled, squares, weight.view(torch.int32) if packed else weight,
            bias, out, *conv[:4], *residual, batch, out_features, parts, eps,
            scaled.stride(0), 0 if squares is None else squares.stride(0),
            0 if out is None else out.stride(0), *conv.scalars(), *residual.scalars(),
            K=in_features, EPILOGUE=epilogue, D_CONV=1 if conv.state is None else conv.state.shape[2],
            GROUPS=groups, PACKED=packed, PER_THREAD=16 // weight.dtype.itemsize,
            ELEMENT=tl.float16 if weight.dtype == torch.float16 else tl.bfloat16,
            # Room for the smallest tiles of the kernel ahead, so that its tiles do not matter here.
            BLOCK_PARTS=triton.next_power_of_2(max(parts, in_features // 4, 1)),
            **config, **early_start(pdl, scaled),
        )  # fmt: skip
    return tiles
