"""The convolution behind a product of the library, for the step on a packed state, which it prepares as well.

Both are short, and what is prepared needs the convolution of B and C alone: so programs of their own convolve
those, and go on from there, beside the others.
"""

import torch
import triton
import triton.language as tl

from mamba_kernels.decode_conv_triton import (
    TILE,
    Convolution,
    convolve_in_place,
    convolve_tile,
    load_convolution,
)
from mamba_kernels.decode_norm_triton import inside, late_start, start_next, wait_for_previous
from mamba_kernels.packed_prepare_triton import common_of, constants, load_dt, load_past, prepare
from mamba_kernels.packed_ssm_step import Preparation


@triton.jit(do_not_specialize=["batch"])
def _convolve_and_prepare_kernel(
    zxbcdt_ptr, conv_state_ptr, conv_weight_ptr, conv_bias_ptr, slots_ptr, past_B_ptr, past_dt_ptr,
    position_ptr, dt_bias_ptr, A_log_ptr, weights_ptr, parts_ptr, halves_ptr, bfloats_ptr, unit_ptr,
    batch, dt_min, dt_max, stride_in, stride_slot, stride_channel, stride_tap, stride_B, stride_dt,
    D_CONV: tl.constexpr, BLOCK_M: tl.constexpr, TILE_N: tl.constexpr, D_SSM: tl.constexpr,
    NHEADS: tl.constexpr, D_STATE: tl.constexpr, HEADS_PER_GROUP: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_AGE: tl.constexpr, AS_LOADED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The first programs, row of the batch * GROUPS + group, convolve B and C of that, and `prepare` it.

    The others, (tile of BLOCK_M rows) * (tiles of x) + (tile of TILE_N channels), convolve x.
    """
    GROUPS: tl.constexpr = NHEADS // HEADS_PER_GROUP
    TILES: tl.constexpr = (D_SSM + TILE_N - 1) // TILE_N
    start_next(PDL)
    pid = tl.program_id(0)
    if pid >= batch * GROUPS:
        pid -= batch * GROUPS
        convolve_tile(
            zxbcdt_ptr + D_SSM, conv_state_ptr, conv_weight_ptr, conv_bias_ptr, slots_ptr,
            pid % TILES, pid // TILES, batch, D_SSM, stride_in, stride_slot, stride_channel, stride_tap,
            D_CONV, BLOCK_M, TILE_N, PDL,
        )  # fmt: skip
    else:
        group = pid % GROUPS
        m = pid // GROUPS + tl.arange(0, 1)
        slot = (pid // GROUPS).to(tl.int64)
        if slots_ptr is not None:
            slot = tl.load(slots_ptr + slot).to(tl.int64)
        # The group's B, then its C.
        i = tl.arange(0, 2 * BLOCK_N)
        channel = D_SSM + (i // BLOCK_N * GROUPS + group) * D_STATE + i % BLOCK_N
        is_conv = inside(i % BLOCK_N, D_STATE, BLOCK_N)
        convolution = load_convolution(
            conv_state_ptr, conv_weight_ptr, conv_bias_ptr, slots_ptr, m, m < batch, channel, is_conv,
            stride_slot, stride_channel, stride_tap, D_CONV,
        )  # fmt: skip
        # A row of padding has no past, and does not use what it loads.
        past = load_past(
            past_B_ptr, past_dt_ptr, position_ptr, dt_bias_ptr, A_log_ptr, tl.maximum(slot, 0), group,
            stride_B, stride_dt, NHEADS, D_STATE, HEADS_PER_GROUP, WINDOW, BLOCK_H, BLOCK_N, BLOCK_AGE,
        )  # fmt: skip
        wait_for_previous(PDL)
        row = zxbcdt_ptr + (pid // GROUPS).to(tl.int64) * stride_in
        dt = load_dt(row + 2 * D_SSM + 2 * GROUPS * D_STATE, group, HEADS_PER_GROUP, BLOCK_H)
        BC = convolve_in_place(
            zxbcdt_ptr + D_SSM, convolution, m, m < batch, channel, is_conv, stride_in, stride_tap, D_CONV
        )
        B, C = tl.split(tl.trans(tl.reshape(BC, (2, BLOCK_N))))
        if slot >= 0:
            prepare(
                past, B, C, dt, past_B_ptr, past_dt_ptr, weights_ptr, parts_ptr, halves_ptr, bfloats_ptr,
                unit_ptr, dt_min, dt_max, slot, group, stride_B, stride_dt,
                NHEADS, D_STATE, HEADS_PER_GROUP, WINDOW, BLOCK_H, BLOCK_N, BLOCK_AGE, AS_LOADED,
            )  # fmt: skip


def launch_convolve_and_prepare(
    zxbcdt: torch.Tensor, conv: Convolution, given: Preparation, pdl: bool
) -> None:
    """Convolve x, B and C of zxbcdt in place, behind a product that made it, and prepare their step."""
    packed, batch = given.packed, zxbcdt.shape[0]
    known = constants(packed)
    tiles = triton.cdiv(known["D_SSM"], TILE["BLOCK_N"]) * triton.cdiv(batch, TILE["BLOCK_M"])
    with torch.cuda.device_of(zxbcdt):
        _convolve_and_prepare_kernel[(batch * packed.B.shape[2] + tiles,)](
            zxbcdt, *conv[:4], packed.B, packed.dt, packed.position, given.dt_bias, given.A_log,
            *common_of(packed), batch, *given.dt_limit, zxbcdt.stride(0), *conv.state.stride(),
            packed.B.stride(0), packed.dt.stride(0),
            D_CONV=conv.state.shape[2], BLOCK_M=TILE["BLOCK_M"], TILE_N=TILE["BLOCK_N"], **known,
            num_warps=TILE["num_warps"], **late_start(pdl, zxbcdt),
        )  # fmt: skip
