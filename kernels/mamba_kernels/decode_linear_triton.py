"""Launcher of the decode step's projections, y = normalised @ weight.T (+ bias), and what is fused to them.

Two kernels, matvec and matmul, end in one of these epilogues:

    "store"     out = y
    "conv"      the same, but the columns of x, B and C first go through the causal convolution and SiLU
    "residual"  residual += y, and the next `Normed` is made of it
    "partial"   out[split] = y, one of several sums over a part of K, to be added up by launch_reduce
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from mamba_kernels.backend import interpreting
from mamba_kernels.decode_matmul_triton import matmul_kernel
from mamba_kernels.decode_matvec_triton import matvec_kernel
from mamba_kernels.decode_norm import Normed
from mamba_kernels.decode_norm_triton import early_start, launch_reduce


def config_for(batch: int, out_features: int, in_features: int, dtype: torch.dtype) -> dict[str, Any]:
    """Block sizes of a projection; "kernel" is "matvec" or "matmul".

    A matvec program asks for 24 blocks of its rows of the weight, 12 KB a warp, while the kernel ahead
    still runs. 8 rows a program share what is done once for all rows, where they are short or there are
    very many of them; elsewhere 4 rows, to have more of each under way. A matmul program keeps as much in
    its stages. K is split where there would be fewer programs than multiprocessors, and enough of K.
    """
    if batch <= 8 or dtype == torch.float32:
        warps = 1 if in_features <= 4096 else 2
        block_k = warps * (512 // dtype.itemsize)
        short = in_features <= 1024 and out_features >= 2048
        rows = 8 if batch > 2 or short or out_features >= 32768 else 4
        return {
            "kernel": "matvec", "BLOCK_M": min(8, triton.next_power_of_2(batch)), "BLOCK_N": rows,
            "BLOCK_K": block_k, "PREFETCH": min(triton.cdiv(in_features, block_k), 24 // rows),
            "num_warps": warps,
        }  # fmt: skip
    block_n, block_k, stages = (32, 256, 4) if batch <= 32 else (64, 64, 6)
    splits = max(1, min(8, 256 * block_n // out_features, in_features // 1024))
    while block_n > 16 and splits * out_features < 100 * block_n:
        block_n //= 2
    return {
        "kernel": "matmul", "BLOCK_M": max(16, min(64, triton.next_power_of_2(batch))), "BLOCK_N": block_n,
        "BLOCK_K": block_k, "SPLIT_K": splits, "PREFETCH": 16, "num_warps": 4, "num_stages": stages,
    }  # fmt: skip


@functools.cache
def _shared_memory(device_index: int) -> int:
    """Bytes of shared memory that a program may have."""
    return triton.runtime.driver.active.utils.get_device_properties(device_index)["max_shared_mem"]


def _fitted(config: dict[str, Any], itemsize: int, device: torch.device) -> dict[str, Any]:
    """The config with as many stages as the device's shared memory holds, and smaller blocks if it must."""
    config = dict(config)
    stage = (config["BLOCK_M"] + config["BLOCK_N"]) * config["BLOCK_K"] * itemsize
    limit = _shared_memory(device.index) if device.type == "cuda" else stage * config["num_stages"]
    while stage > limit // 2:
        config["BLOCK_K"] //= 2
        stage //= 2
    config["num_stages"] = min(config["num_stages"], limit // stage)
    return config


class Convolution(NamedTuple):
    """Operands of the "conv" epilogue; first: the row of the weight that is channel 0."""

    state: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    slots: torch.Tensor | None
    first: int

    def scalars(self) -> tuple[int, ...]:
        """The rows of the weight that are channels, and the state's strides."""
        if self.state is None:
            return 0, 0, 0, 0, 0
        return self.first, self.first + self.state.shape[1], *self.state.stride()


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
    partials: torch.Tensor | None = None,
    pdl: bool,
    config: dict[str, Any] | None,
) -> int:
    """Run one projection into `out`, or into the residual; return how many parts of squares that filled.

    partials (splits, batch, out_features) is the work area of a projection onto the residual that the
    config splits over K.
    """
    scaled, squares, eps = normed
    batch, in_features = scaled.shape
    out_features = weight.shape[0]
    config = dict(config or config_for(batch, out_features, in_features, weight.dtype))
    kernel = config.pop("kernel")
    splits = config.pop("SPLIT_K", 1)
    groups, parts = (0, 0) if squares is None else squares.shape[1:]
    mixed = scaled.dtype != weight.dtype
    if partials is None or groups > 1 or mixed:  # launch_reduce has one scale a row, and applies it last
        splits = 1
    epilogue = "store"
    if conv.state is not None:
        epilogue = "conv"
    elif residual.stream is not None:
        epilogue = "residual"
    if splits > 1:
        out, epilogue = partials[:splits], "partial"

    tiles = triton.cdiv(out_features, config["BLOCK_N"])
    grid = (tiles, triton.cdiv(batch, config["BLOCK_M"]), splits)
    operands = (
        bias, out, *conv[:4], *residual, batch, out_features, parts, eps,
        scaled.stride(0), 0 if squares is None else squares.stride(0), 0 if out is None else out.stride(-2),
        *conv.scalars(), *residual.scalars(),
    )  # fmt: skip
    options = {
        "K": in_features, "EPILOGUE": epilogue, "D_CONV": 1 if conv.state is None else conv.state.shape[2],
        **early_start(pdl, scaled),
    }  # fmt: skip
    with torch.cuda.device_of(scaled):
        if kernel == "matvec":
            packed = weight.dtype.itemsize == 2 and in_features % 2 == 0 and weight.storage_offset() % 2 == 0
            words = weight.view(torch.int32) if packed else weight
            matvec_kernel[grid](
                scaled, squares, words, *operands, **options, **config, GROUPS=groups, PACKED=packed,
                ELEMENT=tl.float16 if weight.dtype == torch.float16 else tl.bfloat16,
                PER_THREAD=16 // weight.dtype.itemsize,
                # Room for the smallest tiles of the kernel ahead, so that its tiles do not matter here.
                BLOCK_PARTS=triton.next_power_of_2(max(parts, in_features // 4, 1)),
            )  # fmt: skip
        else:
            matmul_kernel[grid](
                scaled, squares, weight, *operands, out.stride(0) if splits > 1 else 0,
                **options, **_fitted(config, weight.dtype.itemsize, weight.device), GROUPS=max(groups, 1),
                SPLIT_K=splits, SCALE_FIRST=mixed, INTERPRET=interpreting(), BLOCK_PARTS=32,
            )  # fmt: skip
    if splits > 1:
        return launch_reduce(normed, out, bias, *residual, pdl)
    return tiles
