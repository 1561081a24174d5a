"""Launcher of the decode step's projections, y = normalised @ weight.T (+ bias), and what is fused to them.

A few rows are multiplied by the ordinary cores, many by the tensor cores; what follows the product is the
same (decode_epilogue_triton).
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from mamba_kernels import decode_matmul_triton, decode_matvec_triton
from mamba_kernels.backend import interpreting
from mamba_kernels.decode_conv_triton import Convolution
from mamba_kernels.decode_norm import Normed
from mamba_kernels.decode_norm_triton import early_start

# Rows of a batch from which on the tensor cores are faster.
MATMUL_ROWS = 9


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
    # A configuration is for the kernel whose entries it has.
    matmul = batch >= MATMUL_ROWS if config is None else "SLICES" in config
    kernels = decode_matmul_triton if matmul else decode_matvec_triton
    config = config or kernels.config_for(batch, out_features, in_features, weight.dtype)
    tiles = triton.cdiv(out_features, config["BLOCK_N"])
    groups, parts = (0, 0) if squares is None else squares.shape[1:]
    epilogue = "store"
    if conv.state is not None:
        epilogue = "conv"
    elif residual.stream is not None:
        epilogue = "residual"
    tensors = scaled, squares, weight, bias, out, *conv[:4], *residual
    scalars = (
        batch, out_features, parts, eps,
        scaled.stride(0), 0 if squares is None else squares.stride(0),
        0 if out is None else out.stride(0), *conv.scalars(), *residual.scalars(),
    )  # fmt: skip
    options = {
        "K": in_features, "EPILOGUE": epilogue, "GROUPS": groups,
        "D_CONV": 1 if conv.state is None else conv.state.shape[2], **early_start(pdl, scaled),
    }  # fmt: skip
    with torch.cuda.device_of(scaled):
        if matmul:
            kernels.matmul_kernel[(tiles * triton.cdiv(batch, config["BLOCK_M"] * config["TILES_M"]),)](
                *tensors, *scalars, **options, **config,
                # Several groups have several scales; a wider type may hold what the weight's cannot.
                SCALE_FIRST=groups > 1 or (groups == 1 and scaled.dtype.itemsize > weight.dtype.itemsize),
                # Room for tiles of 32 of the kernel ahead, so that larger ones compile nothing anew.
                BLOCK_PARTS=triton.next_power_of_2(max(parts, in_features // 32, 1)),
                SLICE=decode_matmul_triton.SLICE, INTERPRET=interpreting(),
            )  # fmt: skip
        else:
            packed = weight.dtype.itemsize == 2 and in_features % 2 == 0 and weight.storage_offset() % 2 == 0
            words = weight.view(torch.int32) if packed else weight
            kernels.matvec_kernel[(tiles, triton.cdiv(batch, config["BLOCK_M"]))](
                *tensors[:2], words, *tensors[3:], *scalars, **options, **config,
                PACKED=packed, PER_THREAD=16 // weight.dtype.itemsize,
                ELEMENT=tl.float16 if weight.dtype == torch.float16 else tl.bfloat16,
                # Room for the smallest tiles of the kernel ahead, so that its tiles do not matter here.
                BLOCK_PARTS=triton.next_power_of_2(max(parts, in_features // 4, 1)),
            )  # fmt: skip
    return tiles
