"""Triton kernel ahead of the step on a packed state: what rows of a head, or heads of a group, share.

The step reads a head's rows in many programs. What does not depend on the row is made here once:

    decay[head] = exp(A (dt now + sum of the window's))
    factor[head, i] = exp(A (dt after i)) dt_i, i a place of the window's ring, this token's among them
    weight[head, i] = factor[head, i] (C B_i)

with dt after i the sum of the dt of later inputs, of this token's too; and C in the parts that codes are
multiplied by as they were loaded, see `packed_products_triton`. This token's dt and B go into the window.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from mamba_kernels.decode_norm_triton import early_start, inside, start_next, wait_for_previous
from mamba_kernels.packed_products_triton import (
    CHUNK,
    LARGEST,
    LIVE,
    SMALLEST,
    is_among,
)
from mamba_kernels.packed_state import PackedState
from mamba_kernels.state_codes import FORMATS, STATE_DTYPES
from mamba_kernels.state_codes_triton import BF16, FP8, FP16, INT4, INT8
from mamba_kernels.triton_math import softplus


class Common(NamedTuple):
    """What a step's two kernels hand over.

    weights: (slots, nheads, 2 + 2 * window) float32, the decay, this token's weight, the weights of the
    window in its ring's order, 0 in this token's place, and the factors.
    parts: (slots, ngroups, 3, LIVE, bytes of an int8 row) int8, C as an integer in 4 parts of 7 bits, the
    lowest first, for int8 codes, for the lower and for the upper halves of int4 codes.
    halves: (slots, ngroups, 2, LIVE, d_state) float16, C in 3 parts, the largest first, each a multiple of
    2^-11 of the unit of the one before, for fp16 codes and for fp8 codes.
    bfloats: (slots, ngroups, LIVE, d_state) bfloat16, C as a sum of 3 parts, for bf16 codes.
    unit: (slots, ngroups, 2) float32, what parts and halves are multiples of.
    """

    weights: torch.Tensor
    parts: torch.Tensor
    halves: torch.Tensor
    bfloats: torch.Tensor
    unit: torch.Tensor


def common_of(packed: PackedState) -> Common:
    """The layer's work area, made at its first token."""
    if "common" not in packed.work:
        packed.work["common"] = _empty_common(packed)
    common = packed.work["common"]
    assert isinstance(common, Common)
    return common


def _empty_common(packed: PackedState) -> Common:
    slots, window, nheads, _ = packed.x.shape
    ngroups, d_state = packed.B.shape[2:]
    device = packed.codes.device
    return Common(
        torch.empty(slots, nheads, 2 + 2 * window, device=device),
        torch.empty(slots, ngroups, 3, LIVE.value, -(-d_state // 4) * 4, dtype=torch.int8, device=device),
        torch.empty(slots, ngroups, 2, LIVE.value, d_state, dtype=torch.float16, device=device),
        torch.empty(slots, ngroups, LIVE.value, d_state, dtype=torch.bfloat16, device=device),
        torch.empty(slots, ngroups, 2, device=device),
    )


def multiplied_as_loaded(packed: PackedState) -> int:
    """Bit i is set where heads of format i of STATE_DTYPES are multiplied in the order they are loaded in.

    Their rows are whole chunks, and no columns have factors: the same C serves all heads of a group.
    """
    bits = 0
    for dtype in ("int8", "int4", "fp8", "fp16", "bf16"):
        row = packed.d_state * FORMATS[dtype].bits // 8
        if packed.columns is None and dtype in packed.format.heads and row % CHUNK.value == 0:
            bits |= 1 << STATE_DTYPES.index(dtype)
    return bits


@triton.jit
def _prepare_kernel(
    zxbcdt_ptr, past_B_ptr, past_dt_ptr, position_ptr, slots_ptr, dt_bias_ptr, A_log_ptr,
    weights_ptr, parts_ptr, halves_ptr, bfloats_ptr, unit_ptr,
    dt_min, dt_max, stride_in, stride_B, stride_dt,
    NHEADS: tl.constexpr, HEADDIM: tl.constexpr, D_STATE: tl.constexpr, HEADS_PER_GROUP: tl.constexpr,
    WINDOW: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_AGE: tl.constexpr,
    AS_LOADED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program pid = batch * GROUPS + group prepares the heads of one group of one sequence.

    i: BLOCK_H >= HEADS_PER_GROUP heads. n: BLOCK_N >= D_STATE columns. age: BLOCK_AGE >= WINDOW inputs, 0 is
    the newest. AS_LOADED: the formats that C's parts are wanted for, see `multiplied_as_loaded`.
    """
    GROUPS: tl.constexpr = NHEADS // HEADS_PER_GROUP
    D_SSM: tl.constexpr = NHEADS * HEADDIM
    BC: tl.constexpr = GROUPS * D_STATE
    start_next(PDL)
    group = tl.program_id(0) % GROUPS
    batch = (tl.program_id(0) // GROUPS).to(tl.int64)
    slot = batch
    if slots_ptr is not None:
        slot = tl.load(slots_ptr + batch).to(tl.int64)
        if slot < 0:
            wait_for_previous(PDL)  # else a batch of padding alone would let later kernels start too early
            return
    i = tl.arange(0, BLOCK_H)
    i_in = inside(i, HEADS_PER_GROUP, BLOCK_H)
    head = group * HEADS_PER_GROUP + i
    n = tl.arange(0, BLOCK_N)
    n_in = inside(n, D_STATE, BLOCK_N)
    position = tl.load(position_ptr + slot)
    A = -tl.exp(tl.load(A_log_ptr + head, mask=i_in, other=0.0).to(tl.float32))
    dt_bias = tl.load(dt_bias_ptr + head, mask=i_in, other=0.0).to(tl.float32)
    count = (position + head) % WINDOW
    past_B_ptr += slot * stride_B + group * D_STATE
    past_dt_ptr += slot * stride_dt
    weights_ptr += (slot * NHEADS + head) * (2 + 2 * WINDOW)
    now = position % WINDOW
    # The window, the newest first: all of B, so that it is read once for all heads, dt where a head's stored
    # state lacks the input, and dt of the input after each, whose sums are the dt after.
    age = tl.arange(0, BLOCK_AGE)
    ring = (position + (2 * WINDOW - 1) - age) % WINDOW
    past = age < WINDOW - 1
    live = (age[:, None] < count[None, :]) & i_in[None, :]
    past_B = tl.load(
        past_B_ptr + (ring * BC)[:, None] + n[None, :], mask=past[:, None] & n_in[None, :], other=0.0
    )
    past_dt = tl.load(past_dt_ptr + (ring * NHEADS)[:, None] + head[None, :], mask=live, other=0.0)
    newer = (position + 2 * WINDOW - age) % WINDOW
    newer_ptrs = past_dt_ptr + (newer * NHEADS)[:, None] + head[None, :]
    newer_dt = tl.load(newer_ptrs, mask=live & (age > 0)[:, None], other=0.0)

    wait_for_previous(PDL)
    row = zxbcdt_ptr + batch * stride_in
    B_ptr = row + 2 * D_SSM + group * D_STATE
    C_ptr = B_ptr + BC
    dt = tl.load(row + 2 * D_SSM + 2 * BC + head, mask=i_in, other=0.0).to(tl.float32)
    B_now = tl.load(B_ptr + n, mask=n_in, other=0.0)
    C = tl.load(C_ptr + n, mask=n_in, other=0.0).to(tl.float32)
    dt = tl.minimum(tl.maximum(softplus(dt + dt_bias), dt_min), dt_max)
    since = dt[None, :] + tl.cumsum(newer_dt, axis=0)
    factor = past_dt * tl.exp(A[None, :] * since)
    weight = factor * tl.sum(past_B.to(tl.float32) * C[None, :], axis=1)[:, None]
    ring_in = past[:, None] & i_in[None, :]
    tl.store(weights_ptr[None, :] + 2 + ring[:, None], weight, mask=ring_in)
    tl.store(weights_ptr[None, :] + (2 + WINDOW) + ring[:, None], factor, mask=ring_in)
    tl.store(weights_ptr + 2 + now, tl.zeros_like(dt), mask=i_in)
    tl.store(weights_ptr + (2 + WINDOW) + now, dt, mask=i_in)
    tl.store(weights_ptr + 1, dt * tl.sum(B_now.to(tl.float32) * C, axis=0), mask=i_in)
    tl.store(weights_ptr, tl.exp(A * (dt + tl.sum(past_dt, axis=0))), mask=i_in)
    # This token's place in the window is one that no head still reads.
    tl.store(past_dt_ptr + now * NHEADS + head, dt, mask=i_in)
    tl.store(past_B_ptr + now * BC + n, B_now, mask=n_in)

    top = tl.maximum(tl.max(tl.abs(C), axis=0), SMALLEST)
    unit_ptr += (slot * GROUPS + group) * 2
    if is_among(INT8, AS_LOADED) or is_among(INT4, AS_LOADED):
        unit = top / LARGEST
        tl.store(unit_ptr, unit)
        ROW: tl.constexpr = (D_STATE + 3) // 4 * 4
        parts_ptr += (slot * GROUPS + group) * (3 * LIVE * ROW)
        if is_among(INT8, AS_LOADED):
            _store_parts(parts_ptr, C_ptr, unit, 0, 1, D_STATE, ROW, BLOCK_N)
        if is_among(INT4, AS_LOADED):
            _store_parts(parts_ptr + LIVE * ROW, C_ptr, unit, 0, 2, D_STATE, ROW, BLOCK_N // 2)
            _store_parts(parts_ptr + 2 * LIVE * ROW, C_ptr, unit, 1, 2, D_STATE, ROW, BLOCK_N // 2)
    group_row = slot * GROUPS + group
    if is_among(FP16, AS_LOADED) or is_among(FP8, AS_LOADED):
        # A power of two: its multiples are exact, and the first part holds the whole of a 16-bit C, but for
        # what is too small beside the largest to count in float32.
        power = (top.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        tl.store(unit_ptr + 1, power)
        halves_ptr += group_row * (2 * LIVE * D_STATE)
        if is_among(FP16, AS_LOADED):
            _store_floats(halves_ptr, C_ptr, power, 2048.0, 2, D_STATE, BLOCK_N)
        if is_among(FP8, AS_LOADED):
            _store_floats(halves_ptr + LIVE * D_STATE, C_ptr, power, 2048.0, 4, D_STATE, BLOCK_N)
    if is_among(BF16, AS_LOADED):
        _store_floats(bfloats_ptr + group_row * (LIVE * D_STATE), C_ptr, 1.0, 1.0, 2, D_STATE, BLOCK_N)


@triton.jit
def _store_parts(
    parts_ptr, C_ptr, unit, half: tl.constexpr, HALVES: tl.constexpr, D_STATE: tl.constexpr,
    ROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """C of the columns with codes in part `half` of HALVES of each byte of a row, in the bytes' order."""
    WORDS: tl.constexpr = D_STATE // (4 * HALVES)
    place = tl.arange(0, BLOCK)
    column = (place % 4 * HALVES + half) * WORDS + place // 4
    place_in = place < 4 * WORDS
    C = tl.load(C_ptr + column, mask=place_in, other=0.0).to(tl.float32)
    whole = (C / unit).to(tl.int32)
    part = tl.arange(0, LIVE)[None, :]
    # 7 bits of each, which are positive as int8, but the last keeps the sign.
    value = tl.where(part < 3, whole[:, None] >> 7 * part & 127, whole[:, None] >> 21)
    tl.store(parts_ptr + part * ROW + place[:, None], value.to(tl.int8), mask=place_in[:, None])


@triton.jit
def _store_floats(
    parts_ptr, C_ptr, unit, NEXT: tl.constexpr, FIELDS: tl.constexpr, D_STATE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """C in `unit` as a sum of three numbers of 16 bits, each in 1 / NEXT of the one before.

    In the order of codes with FIELDS in a word. fp8 codes, which are multiplied as float16, are in two halves
    of a chunk: of each lane's 16 codes the first 8, and the second.
    """
    place = tl.arange(0, BLOCK)
    place_in = place < D_STATE
    number = place
    if FIELDS == 4:
        number = place // CHUNK * CHUNK + place % 32 // 8 * 16 + place % CHUNK // 32 * 8 + place % 8
    column = number % FIELDS * (D_STATE // FIELDS) + number // FIELDS
    C = tl.load(C_ptr + column, mask=place_in, other=0.0).to(tl.float32) / unit
    parts_ptr += place
    for part in tl.static_range(LIVE):
        value = C.to(parts_ptr.dtype.element_ty)
        tl.store(parts_ptr + part * D_STATE, value, mask=place_in)
        # What the bits of the one before leave of float32's 24.
        C = (C - value.to(tl.float32)) * NEXT if part < 2 else C * 0.0


def launch_prepare(
    zxbcdt: torch.Tensor,
    packed: PackedState,
    dt_bias: torch.Tensor,
    A_log: torch.Tensor,
    common: Common,
    *,
    ngroups: int,
    dt_limit: tuple[float, float],
    slots: torch.Tensor | None,
    pdl: bool,
) -> None:
    """Fill `common` for the rows of zxbcdt, and take their dt and B into the window."""
    nheads = len(packed.format.heads)
    _prepare_kernel[(zxbcdt.shape[0] * ngroups,)](
        zxbcdt, packed.B, packed.dt, packed.position, slots, dt_bias, A_log, *common,
        *dt_limit, zxbcdt.stride(0), packed.B.stride(0), packed.dt.stride(0),
        NHEADS=nheads, HEADDIM=packed.headdim, D_STATE=packed.d_state, HEADS_PER_GROUP=nheads // ngroups,
        WINDOW=packed.format.window, BLOCK_H=triton.next_power_of_2(nheads // ngroups),
        BLOCK_AGE=triton.next_power_of_2(packed.format.window),
        BLOCK_N=max(8, triton.next_power_of_2(packed.d_state)), AS_LOADED=multiplied_as_loaded(packed),
        num_warps=4, **early_start(pdl, zxbcdt),
    )  # fmt: skip
