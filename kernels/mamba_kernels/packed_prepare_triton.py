"""Triton pieces ahead of the step on a packed state: what rows of a head, or heads of a group, share.

The step reads a head's rows in many programs. What does not depend on the row is made here once:

    decay[head] = exp(A (dt now + sum of the window's))
    factor[head, i] = exp(A (dt after i)) dt_i, i a place of the window's ring, this token's among them
    weight[head, i] = factor[head, i] (C B_i)

with dt after i the sum of the dt of later inputs, of this token's too; and C in the parts that codes are
multiplied by as they were loaded, see `packed_products_triton`. This token's dt and B go into the window.

That is a kernel of its own, or the end of the one that convolves, see `packed_convolution_triton`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from mamba_kernels.decode_norm_triton import early_start, inside, start_next, wait_for_previous
from mamba_kernels.packed_products_triton import CHUNK, LARGEST, LIVE, SMALLEST
from mamba_kernels.packed_ssm_step import Preparation
from mamba_kernels.packed_state import PackedState
from mamba_kernels.state_codes import FORMATS, STATE_DTYPES
from mamba_kernels.state_codes_triton import BF16, FP8, FP16, INT4, INT8, is_among
from mamba_kernels.triton_math import softplus


class Common(NamedTuple):
    """What the first of a step's two kernels hands the second; what no head's format needs has no slots.

    weights: (slots, nheads, 2 + 2 * window) float32, the decay, this token's weight, the weights of the
    window in its ring's order, 0 in this token's place, and the factors.
    parts: (slots, ngroups, 3, LIVE, d_state) int8, C as an integer in 4 parts of 7 bits, the lowest first,
    for int8 codes, for the lower and for the upper halves of int4 codes.
    halves: (slots, ngroups, 2, LIVE, d_state) float16, C in 3 parts and zeros, the largest first, each a
    multiple of 2^-11 of the unit of the one before, for fp16 codes and for fp8 codes.
    bfloats: (slots, ngroups, LIVE, d_state) bfloat16, C as a sum of 3 parts and zeros, for bf16 codes.
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
    device, as_loaded = packed.codes.device, multiplied_as_loaded(packed)

    def empty_parts(kinds: tuple[tl.constexpr, ...], *shape: int, dtype: torch.dtype) -> torch.Tensor:
        count = slots if any(is_among(kind, as_loaded) for kind in kinds) else 0
        return torch.empty(count, ngroups, *shape, LIVE.value, d_state, dtype=dtype, device=device)

    return Common(
        torch.empty(slots, nheads, 2 + 2 * window, device=device),
        empty_parts((INT8, INT4), 3, dtype=torch.int8),
        empty_parts((FP16, FP8), 2, dtype=torch.float16),
        empty_parts((BF16,), dtype=torch.bfloat16),
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
def load_past(
    past_B_ptr, past_dt_ptr, position_ptr, dt_bias_ptr, A_log_ptr, slot, group, stride_B, stride_dt,
    NHEADS: tl.constexpr, D_STATE: tl.constexpr, HEADS_PER_GROUP: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_AGE: tl.constexpr,
):  # fmt: skip
    """What `prepare` needs of the tokens before this one, and of parameters.

    The window is whole and in its ring's order: which input is the newest, and which a head has stored
    already, follows from the position, and the loads would have to wait for that.
    """
    i = tl.arange(0, BLOCK_H)
    i_in = inside(i, HEADS_PER_GROUP, BLOCK_H)
    head = group * HEADS_PER_GROUP + i
    n = tl.arange(0, BLOCK_N)
    n_in = inside(n, D_STATE, BLOCK_N)
    ring = tl.arange(0, BLOCK_AGE)
    ring_in = inside(ring, WINDOW, BLOCK_AGE)
    position = tl.load(position_ptr + slot)
    B_ptrs = past_B_ptr + slot * stride_B + (ring * (NHEADS // HEADS_PER_GROUP) + group)[:, None] * D_STATE
    past_B = tl.load(B_ptrs + n[None, :], mask=ring_in[:, None] & n_in[None, :], other=0.0)
    dt_ptrs = past_dt_ptr + slot * stride_dt + (ring * NHEADS)[:, None] + head[None, :]
    past_dt = tl.load(dt_ptrs, mask=ring_in[:, None] & i_in[None, :], other=0.0)
    A_log = tl.load(A_log_ptr + head, mask=i_in, other=0.0)
    dt_bias = tl.load(dt_bias_ptr + head, mask=i_in, other=0.0)
    return position, A_log, dt_bias, past_B, past_dt


@triton.jit
def load_dt(row, group, HEADS_PER_GROUP: tl.constexpr, BLOCK_H: tl.constexpr):
    """This token's dt of the heads of a group (BLOCK_H,), from where its row of zxbcdt has them."""
    i = tl.arange(0, BLOCK_H)
    i_in = inside(i, HEADS_PER_GROUP, BLOCK_H)
    return tl.load(row + group * HEADS_PER_GROUP + i, mask=i_in, other=0.0).to(tl.float32)


@triton.jit
def prepare(
    past, B, C, dt, past_B_ptr, past_dt_ptr, weights_ptr, parts_ptr, halves_ptr, bfloats_ptr, unit_ptr,
    dt_min, dt_max, slot, group, stride_B, stride_dt,
    NHEADS: tl.constexpr, D_STATE: tl.constexpr, HEADS_PER_GROUP: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_AGE: tl.constexpr, AS_LOADED: tl.constexpr,
):  # fmt: skip
    """Prepare the heads of one group of one sequence, and take this token into its window.

    past: from `load_past`. B, C: (BLOCK_N,) after the convolution, in the window's dtype, zero past D_STATE.
    dt: (BLOCK_H,) from `load_dt`. weights_ptr to unit_ptr: a `Common`.
    i: BLOCK_H >= HEADS_PER_GROUP heads. n: BLOCK_N >= D_STATE columns. age: BLOCK_AGE >= WINDOW inputs, 0 is
    the newest. AS_LOADED: the formats that C's parts are wanted for, see `multiplied_as_loaded`.
    """
    GROUPS: tl.constexpr = NHEADS // HEADS_PER_GROUP
    position, A_log, dt_bias, past_B, past_dt = past
    i = tl.arange(0, BLOCK_H)
    i_in = inside(i, HEADS_PER_GROUP, BLOCK_H)
    head = group * HEADS_PER_GROUP + i
    n = tl.arange(0, BLOCK_N)
    n_in = inside(n, D_STATE, BLOCK_N)
    age = tl.arange(0, BLOCK_AGE)
    now = position % WINDOW
    C = C.to(tl.float32)
    CB = tl.sum(past_B.to(tl.float32) * C[None, :], axis=1)
    A = -tl.exp(A_log.to(tl.float32))
    dt = tl.minimum(tl.maximum(softplus(dt + dt_bias.to(tl.float32)), dt_min), dt_max)
    # The newest first, but where a head's stored state has the input; and the dt of the input after each.
    ring = (position + (2 * WINDOW - 1) - age) % WINDOW
    newer = (position + 2 * WINDOW - age) % WINDOW
    live = (age[:, None] < ((position + head) % WINDOW)[None, :]) & i_in[None, :]
    newer_dt = tl.gather(past_dt, tl.broadcast_to(newer[:, None], (BLOCK_AGE, BLOCK_H)), 0)
    past_dt = tl.gather(past_dt, tl.broadcast_to(ring[:, None], (BLOCK_AGE, BLOCK_H)), 0)
    newer_dt = tl.where(live & (age > 0)[:, None], newer_dt, 0.0)
    past_dt = tl.where(live, past_dt, 0.0)
    since = dt[None, :] + tl.cumsum(newer_dt, axis=0)
    factor = past_dt * tl.exp(A[None, :] * since)
    weight = factor * tl.gather(CB, ring, 0)[:, None]
    weights_ptr += (slot * NHEADS + head) * (2 + 2 * WINDOW)
    ring_in = (age < WINDOW - 1)[:, None] & i_in[None, :]
    tl.store(weights_ptr[None, :] + 2 + ring[:, None], weight, mask=ring_in)
    tl.store(weights_ptr[None, :] + (2 + WINDOW) + ring[:, None], factor, mask=ring_in)
    tl.store(weights_ptr + 2 + now, tl.zeros_like(dt), mask=i_in)
    tl.store(weights_ptr + (2 + WINDOW) + now, dt, mask=i_in)
    tl.store(weights_ptr + 1, dt * tl.sum(B.to(tl.float32) * C, axis=0), mask=i_in)
    tl.store(weights_ptr, tl.exp(A * (dt + tl.sum(past_dt, axis=0))), mask=i_in)
    # This token's place in the window is one that no head still reads.
    tl.store(past_dt_ptr + slot * stride_dt + now * NHEADS + head, dt, mask=i_in)
    tl.store(past_B_ptr + slot * stride_B + (now * GROUPS + group) * D_STATE + n, B, mask=n_in)

    group_row = slot * GROUPS + group
    top = tl.maximum(tl.max(tl.abs(C), axis=0), SMALLEST)
    if is_among(INT8, AS_LOADED) or is_among(INT4, AS_LOADED):
        unit = top / LARGEST
        tl.store(unit_ptr + 2 * group_row, unit)
        parts_ptr += group_row * (3 * LIVE * D_STATE)
        if is_among(INT8, AS_LOADED):
            _store_parts(parts_ptr, C / unit, n, n_in, 1, D_STATE)
        if is_among(INT4, AS_LOADED):
            _store_parts(parts_ptr + LIVE * D_STATE, C / unit, n, n_in, 2, D_STATE)
    if is_among(FP16, AS_LOADED) or is_among(FP8, AS_LOADED):
        # A power of two: its multiples are exact, and the first part holds the whole of a 16-bit C, but for
        # what is too small beside the largest to count in float32.
        power = (top.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        tl.store(unit_ptr + 2 * group_row + 1, power)
        halves_ptr += group_row * (2 * LIVE * D_STATE)
        if is_among(FP16, AS_LOADED):
            _store_floats(halves_ptr, C / power, n, n_in, 2048.0, 2, D_STATE)
        if is_among(FP8, AS_LOADED):
            _store_floats(halves_ptr + LIVE * D_STATE, C / power, n, n_in, 2048.0, 4, D_STATE)
    if is_among(BF16, AS_LOADED):
        _store_floats(bfloats_ptr + group_row * (LIVE * D_STATE), C, n, n_in, 1.0, 2, D_STATE)


@triton.jit
def _store_parts(parts_ptr, C, n, n_in, HALVES: tl.constexpr, D_STATE: tl.constexpr):
    """C (N,), in its unit, each column where a byte of a row has its code, in the part HALVES-th of that.

    A word of codes has every WORDS-th column, and a byte of it HALVES of them, which are tiles of their own.
    """
    WORDS: tl.constexpr = D_STATE // (4 * HALVES)
    field = n // WORDS
    place = n % WORDS * 4 + field // HALVES + field % HALVES * (LIVE * D_STATE)
    whole = C.to(tl.int32)
    part = tl.arange(0, LIVE)[None, :]
    # 7 bits of each, which are positive as int8, but the last keeps the sign.
    value = tl.where(part < 3, whole[:, None] >> 7 * part & 127, whole[:, None] >> 21)
    tl.store(parts_ptr + part * D_STATE + place[:, None], value.to(tl.int8), mask=n_in[:, None])


@triton.jit
def _store_floats(parts_ptr, C, n, n_in, NEXT: tl.constexpr, FIELDS: tl.constexpr, D_STATE: tl.constexpr):
    """C (N,), in its unit, as a sum of three numbers of 16 bits, each in 1 / NEXT of the one before,
    and zeros.

    In the order of codes with FIELDS in a word. fp8 codes, which are multiplied as float16, are in two halves
    of a chunk: of each lane's 16 codes the first 8, and the second.
    """
    place = n % (D_STATE // FIELDS) * FIELDS + n // (D_STATE // FIELDS)
    if FIELDS == 4:
        place = place // CHUNK * CHUNK + place // 8 % 2 * 32 + place % CHUNK // 16 * 8 + place % 8
    parts_ptr += place
    for part in tl.static_range(LIVE):
        value = C.to(parts_ptr.dtype.element_ty)
        tl.store(parts_ptr + part * D_STATE, value, mask=n_in)
        # What the bits of the one before leave of float32's 24.
        C = (C - value.to(tl.float32)) * NEXT if part < 2 else C * 0.0


@triton.jit
def _prepare_kernel(
    zxbcdt_ptr, past_B_ptr, past_dt_ptr, position_ptr, slots_ptr, dt_bias_ptr, A_log_ptr,
    weights_ptr, parts_ptr, halves_ptr, bfloats_ptr, unit_ptr,
    dt_min, dt_max, stride_in, stride_B, stride_dt,
    D_SSM: tl.constexpr, NHEADS: tl.constexpr, D_STATE: tl.constexpr, HEADS_PER_GROUP: tl.constexpr,
    WINDOW: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_AGE: tl.constexpr,
    AS_LOADED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program pid = batch * GROUPS + group: `prepare` that."""
    GROUPS: tl.constexpr = NHEADS // HEADS_PER_GROUP
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
    past = load_past(
        past_B_ptr, past_dt_ptr, position_ptr, dt_bias_ptr, A_log_ptr, slot, group, stride_B, stride_dt,
        NHEADS, D_STATE, HEADS_PER_GROUP, WINDOW, BLOCK_H, BLOCK_N, BLOCK_AGE,
    )  # fmt: skip
    wait_for_previous(PDL)
    row = zxbcdt_ptr + batch * stride_in + 2 * D_SSM
    dt = load_dt(row + 2 * BC, group, HEADS_PER_GROUP, BLOCK_H)
    n = tl.arange(0, BLOCK_N)
    n_in = inside(n, D_STATE, BLOCK_N)
    B = tl.load(row + group * D_STATE + n, mask=n_in, other=0.0)
    C = tl.load(row + BC + group * D_STATE + n, mask=n_in, other=0.0)
    prepare(
        past, B, C, dt, past_B_ptr, past_dt_ptr, weights_ptr, parts_ptr, halves_ptr, bfloats_ptr, unit_ptr,
        dt_min, dt_max, slot, group, stride_B, stride_dt,
        NHEADS, D_STATE, HEADS_PER_GROUP, WINDOW, BLOCK_H, BLOCK_N, BLOCK_AGE, AS_LOADED,
    )  # fmt: skip


def launch_prepare(zxbcdt: torch.Tensor, given: Preparation, slots: torch.Tensor | None, pdl: bool) -> None:
    """Prepare the step of the rows of zxbcdt, behind the convolution."""
    packed = given.packed
    with torch.cuda.device_of(zxbcdt):
        _prepare_kernel[(zxbcdt.shape[0] * packed.B.shape[2],)](
            zxbcdt, packed.B, packed.dt, packed.position, slots, given.dt_bias, given.A_log,
            *common_of(packed), *given.dt_limit, zxbcdt.stride(0), packed.B.stride(0), packed.dt.stride(0),
            **constants(packed), num_warps=4, **early_start(pdl, zxbcdt),
        )  # fmt: skip


def constants(packed: PackedState) -> dict[str, int]:
    """Compile-time arguments of the kernels that prepare."""
    nheads, (ngroups, d_state), window = len(packed.format.heads), packed.B.shape[2:], packed.format.window
    return {
        "D_SSM": nheads * packed.headdim,
        "NHEADS": nheads,
        "D_STATE": d_state,
        "HEADS_PER_GROUP": nheads // ngroups,
        "WINDOW": window,
        "BLOCK_H": triton.next_power_of_2(nheads // ngroups),
        "BLOCK_N": max(8, triton.next_power_of_2(d_state)),
        "BLOCK_AGE": triton.next_power_of_2(window),
        "AS_LOADED": multiplied_as_loaded(packed),
    }
