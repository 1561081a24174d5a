"""Triton kernel ahead of the step on a packed state: what all rows of a head, or all heads, have in common.

The step reads a head's rows in many programs. What does not depend on the row is made here once:

    decay[head] = exp(A (dt now + sum of the window's))
    weight[head, i] = exp(A (dt after i)) dt_i (C B_i), i a place of the window's ring, or this token's

and C in the form that integer codes are multiplied by on the tensor cores.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from mamba_kernels.decode_norm_triton import early_start, inside, start_next, wait_for_previous
from mamba_kernels.packed_state import PackedState
from mamba_kernels.state_codes import FORMATS, STATE_DTYPES
from mamba_kernels.triton_math import softplus

# Bytes of a row of codes that a lane's 16 take a quarter of: the least that is multiplied as it is loaded.
CHUNK = 64


class Common(NamedTuple):
    """Work area of a layer.

    weights: (slots, nheads, 1 + window) float32, the decay first. parts: (slots, ngroups, 3, 8, bytes of an
    int8 row) int8, C as an integer of 4 parts of 7 bits, from the lowest up, and 4 of zeros: for int8 codes,
    for the lower and for the upper halves of int4 codes. halves: (slots, ngroups, 8, d_state) float16, C as
    3 numbers, from the largest down, each in units of 2^-11 of the one before, and 5 of zeros. unit: (slots,
    ngroups, 2) float32, what parts and halves are multiples of.
    """

    weights: torch.Tensor
    parts: torch.Tensor
    halves: torch.Tensor
    unit: torch.Tensor


def empty_common(packed: PackedState) -> Common:
    slots, window, nheads, _ = packed.x.shape
    ngroups, d_state = packed.B.shape[2:]
    device = packed.codes.device
    return Common(
        torch.empty(slots, nheads, 1 + window, device=device),
        torch.empty(slots, ngroups, 3, 8, -(-d_state // 4) * 4, dtype=torch.int8, device=device),
        torch.empty(slots, ngroups, 8, d_state, dtype=torch.float16, device=device),
        torch.empty(slots, ngroups, 2, device=device),
    )


def multiplied_as_loaded(packed: PackedState) -> int:
    """Bit i: rows of format i of STATE_DTYPES are whole chunks, and the same C serves all heads."""
    bits = 0
    for dtype in ("int8", "int4", "fp16"):
        row = packed.d_state * FORMATS[dtype].bits // 8
        if packed.columns is None and dtype in packed.format.heads and row % CHUNK == 0:
            bits |= 1 << STATE_DTYPES.index(dtype)
    return bits


@triton.jit
def _prepare_kernel(
    zxbcdt_ptr, past_B_ptr, past_dt_ptr, position_ptr, slots_ptr, dt_bias_ptr, A_log_ptr,
    weights_ptr, parts_ptr, halves_ptr, unit_ptr,
    dt_min, dt_max, stride_in, stride_B, stride_dt,
    NHEADS: tl.constexpr, HEADDIM: tl.constexpr, D_STATE: tl.constexpr, HEADS_PER_GROUP: tl.constexpr,
    WINDOW: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_AGE: tl.constexpr,
    INT8: tl.constexpr, INT4: tl.constexpr, FP16: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program pid = batch * groups + group. INT8, INT4, FP16: whether C
    is wanted for such codes, see `multiplied_as_loaded`."""
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
    weights_ptr += (slot * NHEADS + head) * (1 + WINDOW)
    now = position % WINDOW
    # The window, the newest first; dt also of the input after each.
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
    weight = (
        past_dt * tl.exp(A[None, :] * since) * tl.sum(past_B.to(tl.float32) * C[None, :], axis=1)[:, None]
    )
    tl.store(weights_ptr[None, :] + 1 + ring[:, None], weight, mask=past[:, None] & i_in[None, :])
    tl.store(weights_ptr + 1 + now, dt * tl.sum(B_now.to(tl.float32) * C, axis=0), mask=i_in)
    tl.store(weights_ptr, tl.exp(A * (dt + tl.sum(past_dt, axis=0))), mask=i_in)
    # This token's place in the window is one that no head still reads.
    tl.store(past_dt_ptr + now * NHEADS + head, dt, mask=i_in)
    tl.store(past_B_ptr + now * BC + n, B_now, mask=n_in)

    top = tl.maximum(tl.max(tl.abs(C), axis=0), 1e-30)
    unit_ptr += (slot * GROUPS + group) * 2
    if INT8 or INT4:
        # Of 29 bits with the sign: multiplied exactly, no less than float32 would keep.
        unit = top / 268435200.0  # just below 2^28
        tl.store(unit_ptr, unit)
        ROW: tl.constexpr = (D_STATE + 3) // 4 * 4
        parts_ptr += (slot * GROUPS + group) * (3 * 8 * ROW)
        if INT8:
            _store_parts(parts_ptr, C_ptr, unit, 0, 1, D_STATE, ROW, BLOCK_N)
        if INT4:
            _store_parts(parts_ptr + 8 * ROW, C_ptr, unit, 0, 2, D_STATE, ROW, BLOCK_N // 2)
            _store_parts(parts_ptr + 16 * ROW, C_ptr, unit, 1, 2, D_STATE, ROW, BLOCK_N // 2)
    if FP16:
        # A power of two, so that a 16-bit C is exact in the first part but for what float32 would not add.
        power = (top.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        tl.store(unit_ptr + 1, power)
        _store_halves(halves_ptr + (slot * GROUPS + group) * (8 * D_STATE), C_ptr, power, D_STATE, BLOCK_N)


@triton.jit
def _store_parts(
    parts_ptr, C_ptr, unit, half: tl.constexpr, HALVES: tl.constexpr, D_STATE: tl.constexpr,
    ROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """C of the columns with codes in half `half` of each byte of a row, in `chunk_as_operand`'s order."""
    WORDS: tl.constexpr = D_STATE // (4 * HALVES)
    place = tl.arange(0, BLOCK)
    word = place // 64 * 16 + place // 4 % 4 * 4 + place // 16 % 4
    column = (place % 4 * HALVES + half) * WORDS + word
    place_in = place < 4 * WORDS
    C = tl.load(C_ptr + column, mask=place_in, other=0.0).to(tl.float32)
    whole = (C / unit).to(tl.int32)
    part = tl.arange(0, 8)[None, :]
    value = tl.where(part < 3, whole[:, None] >> 7 * tl.minimum(part, 3) & 127, whole[:, None] >> 21)
    value = tl.where(part < 4, value, 0)
    tl.store(parts_ptr + part * ROW + place[:, None], value.to(tl.int8), mask=place_in[:, None])


@triton.jit
def _store_halves(halves_ptr, C_ptr, unit, D_STATE: tl.constexpr, BLOCK: tl.constexpr):
    """C in `unit` as a sum of three float16, in the order of `halves_as_operand`."""
    place = tl.arange(0, BLOCK)
    word = place // 32 * 16 + place // 2 % 4 * 4 + place // 8 % 4
    place_in = place < D_STATE
    C = tl.load(C_ptr + place % 2 * (D_STATE // 2) + word, mask=place_in, other=0.0).to(tl.float32) / unit
    halves_ptr += place
    for part in tl.static_range(8):
        half = C.to(tl.float16)
        tl.store(halves_ptr + part * D_STATE, half, mask=place_in)
        C = (C - half.to(tl.float32)) * 2048.0 if part < 2 else C * 0.0


@triton.jit
def load_chunk(codes_ptr, chunk, p, p_in, ROW: tl.constexpr):
    """Bytes (P, 64) of rows p of codes, ROW bytes each: the 64 from chunk * 64 on."""
    byte = tl.arange(0, 64)
    bytes_ptr = codes_ptr.to(tl.pointer_type(tl.int8), bitcast=True)
    ptrs = bytes_ptr + (p * ROW)[:, None] + (chunk * 64 + byte)[None, :]
    return tl.load(ptrs, mask=p_in[:, None], other=0, volatile=True)


@triton.jit
def chunk_as_operand(codes, P: tl.constexpr):
    """The bytes in the order that a lane with 16 neighbours holds them in for the tensor cores."""
    return tl.reshape(tl.permute(tl.reshape(codes, (P, 4, 4, 4)), (0, 2, 1, 3)), (P, 64))


@triton.jit
def load_parts(parts_ptr, chunk, ROW: tl.constexpr):
    """C's parts (64, 8) of a chunk."""
    place = tl.arange(0, 64)
    return tl.load(parts_ptr + (chunk * 64 + place)[:, None] + (tl.arange(0, 8) * ROW)[None, :])


@triton.jit
def load_halves_chunk(codes_ptr, chunk, p, p_in, D_STATE: tl.constexpr):
    """float16 (P, 32) of rows p: the 32 from chunk * 32 on."""
    ptrs = codes_ptr.to(tl.pointer_type(tl.float16), bitcast=True) + (p * D_STATE)[:, None]
    ptrs += (chunk * 32 + tl.arange(0, 32))[None, :]
    return tl.load(ptrs, mask=p_in[:, None], other=0.0, volatile=True)


@triton.jit
def halves_as_operand(codes, P: tl.constexpr):
    """The same as `chunk_as_operand` does, of 8 neighbours."""
    return tl.reshape(tl.permute(tl.reshape(codes, (P, 4, 4, 2)), (0, 2, 1, 3)), (P, 32))


@triton.jit
def load_halves(halves_ptr, chunk, D_STATE: tl.constexpr):
    """C's parts (32, 8) of a chunk of float16."""
    place = tl.arange(0, 32)
    return tl.load(halves_ptr + (chunk * 32 + place)[:, None] + (tl.arange(0, 8) * D_STATE)[None, :])


@triton.jit
def sum_halves(sums):
    """The products with C from those with its parts, float32 (P, 8), in `unit`."""
    part = tl.arange(0, 8)
    return tl.sum(sums * tl.exp2((-11 * part).to(tl.float32))[None, :], axis=1)


@triton.jit
def sum_parts(sums):
    """The products with C from those with its parts, int32 (P, 8), in `unit`."""
    part = tl.arange(0, 8)
    return tl.sum(sums.to(tl.float32) * tl.exp2((7 * part).to(tl.float32))[None, :], axis=1)


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
    as_loaded = multiplied_as_loaded(packed)
    wanted = {dtype.upper(): as_loaded >> STATE_DTYPES.index(dtype) & 1 for dtype in ("int8", "int4", "fp16")}
    _prepare_kernel[(zxbcdt.shape[0] * ngroups,)](
        zxbcdt, packed.B, packed.dt, packed.position, slots, dt_bias, A_log, *common,
        *dt_limit, zxbcdt.stride(0), packed.B.stride(0), packed.dt.stride(0),
        NHEADS=nheads, HEADDIM=packed.headdim, D_STATE=packed.d_state, HEADS_PER_GROUP=nheads // ngroups,
        WINDOW=packed.format.window, BLOCK_H=triton.next_power_of_2(nheads // ngroups),
        BLOCK_AGE=triton.next_power_of_2(packed.format.window),
        BLOCK_N=max(8, triton.next_power_of_2(packed.d_state)), num_warps=4, **wanted,
        **early_start(pdl, zxbcdt),
    )  # fmt: skip
