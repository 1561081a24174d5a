"""Triton kernels that pack a state after a prefill, and unpack one before the next."""

import torch
import triton
import triton.language as tl

from mamba_kernels.backend import interpreting
from mamba_kernels.decode_norm_triton import inside
from mamba_kernels.packed_rows_triton import inverse_columns, load_columns, load_scale, load_words
from mamba_kernels.packed_state import PackedState, head_table
from mamba_kernels.state_codes import first_key
from mamba_kernels.state_codes_triton import (
    decode,
    decoded_unit,
    encode,
    is_among,
    is_scaled,
    per_word,
    rounding_key,
)


@triton.jit(do_not_specialize=["seed"])
def _packed_state_kernel(
    state_ptr, codes_ptr, scales_ptr, past_x_ptr, past_B_ptr, past_dt_ptr, position_ptr, columns_ptr,
    heads_ptr, A_ptr,
    seed, stride_state_slot, stride_state_head, stride_state_p, stride_codes, stride_scales, stride_x,
    stride_B, stride_dt,
    NHEADS: tl.constexpr, HEADDIM: tl.constexpr, D_STATE: tl.constexpr, HEADS_PER_GROUP: tl.constexpr,
    WINDOW: tl.constexpr, KINDS: tl.constexpr, STOCHASTIC: tl.constexpr, PACK: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_AGE: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Program pid = (slot * NHEADS + head) * TILES + tile packs or unpacks rows p of one head.

    p: BLOCK_P rows of HEADDIM. state: float32, unit stride along a row. heads_ptr, KINDS and the unit of
    stride_codes are those of the step's kernel.
    """
    TILES: tl.constexpr = (HEADDIM + BLOCK_P - 1) // BLOCK_P
    D_SSM: tl.constexpr = NHEADS * HEADDIM
    BC: tl.constexpr = NHEADS // HEADS_PER_GROUP * D_STATE
    pid = tl.program_id(0)
    head = pid // TILES % NHEADS
    slot = (pid // (TILES * NHEADS)).to(tl.int64)
    p = pid % TILES * BLOCK_P + tl.arange(0, BLOCK_P)
    p_in = inside(p, HEADDIM, BLOCK_P)
    position = tl.load(position_ptr + slot)
    kind = tl.load(heads_ptr + 2 * head)
    begin = tl.load(heads_ptr + 2 * head + 1).to(tl.int64)
    codes_ptr = codes_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + (slot * stride_codes + begin) * 4
    scales_ptr += slot * stride_scales + head * HEADDIM
    state_ptr += slot * stride_state_slot + head.to(tl.int64) * stride_state_head
    state_ptrs = state_ptr + p.to(tl.int64)[:, None] * stride_state_p
    columns = columns_ptr
    if columns_ptr is not None:
        columns = columns_ptr + head * D_STATE
    for KIND in tl.static_range(6):
        if is_among(KIND, KINDS):
            if kind == KIND:
                if PACK:
                    key = rounding_key(seed, position - 1, head)
                    _pack_rows(
                        state_ptrs, codes_ptr, scales_ptr, columns, key, p, p_in, KIND, D_STATE, STOCHASTIC,
                        BLOCK_N, INTERPRET,
                    )  # fmt: skip
                else:
                    _unpack_rows(
                        state_ptrs, codes_ptr, scales_ptr, columns,
                        past_x_ptr + slot * stride_x + head * HEADDIM,
                        past_B_ptr + slot * stride_B + head // HEADS_PER_GROUP * D_STATE,
                        past_dt_ptr + slot * stride_dt + head, tl.load(A_ptr + head).to(tl.float32), position,
                        (position + head) % WINDOW, p, p_in, KIND, NHEADS, D_STATE, D_SSM, BC, WINDOW,
                        BLOCK_N, BLOCK_AGE,
                    )  # fmt: skip


@triton.jit
def _pack_rows(
    state_ptrs, codes_ptr, scales_ptr, columns, key, p, p_in,
    KIND: tl.constexpr, D_STATE: tl.constexpr, STOCHASTIC: tl.constexpr, BLOCK_N: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    FIELDS: tl.constexpr = per_word(KIND)
    WORDS: tl.constexpr = (D_STATE + FIELDS - 1) // FIELDS
    BLOCK_W: tl.constexpr = BLOCK_N // FIELDS
    w = tl.arange(0, BLOCK_W)
    state = ()
    for field in tl.static_range(FIELDS):
        column_in = (w < WORDS) & (field * WORDS + w < D_STATE)
        both_in = p_in[:, None] & column_in[None, :]
        part = tl.load(state_ptrs + (field * WORDS + w)[None, :], mask=both_in, other=0.0).to(tl.float32)
        if columns is not None and is_scaled(KIND):
            part *= inverse_columns(columns, w, field, WORDS, D_STATE, BLOCK_W)[None, :]
        state += (part,)
    words, scale = encode(state, p, w, key, KIND, WORDS, STOCHASTIC, INTERPRET)
    word_in = p_in[:, None] & inside(w, WORDS, BLOCK_W)[None, :]
    tl.store(codes_ptr + (p * WORDS)[:, None] + w[None, :], words, mask=word_in)
    if is_scaled(KIND):
        tl.store(scales_ptr + p, scale, mask=p_in)


@triton.jit
def _unpack_rows(
    state_ptrs, codes_ptr, scales_ptr, columns, past_x_ptr, past_B_ptr, past_dt_ptr, A, position, count,
    p, p_in,
    KIND: tl.constexpr, NHEADS: tl.constexpr, D_STATE: tl.constexpr, D_SSM: tl.constexpr, BC: tl.constexpr,
    WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_AGE: tl.constexpr,
):  # fmt: skip
    FIELDS: tl.constexpr = per_word(KIND)
    WORDS: tl.constexpr = (D_STATE + FIELDS - 1) // FIELDS
    BLOCK_W: tl.constexpr = BLOCK_N // FIELDS
    w = tl.arange(0, BLOCK_W)
    state = _stored_and_window(
        codes_ptr, scales_ptr, columns, past_x_ptr, past_B_ptr, past_dt_ptr, A, position, count,
        p, p_in, w, KIND, NHEADS, D_STATE, D_SSM, BC, WINDOW, BLOCK_W, BLOCK_AGE,
    )  # fmt: skip
    for field in tl.static_range(FIELDS):
        column_in = (w < WORDS) & (field * WORDS + w < D_STATE)
        both_in = p_in[:, None] & column_in[None, :]
        tl.store(state_ptrs + (field * WORDS + w)[None, :], state[field], mask=both_in)


@triton.jit
def _stored_and_window(
    codes_ptr, scales_ptr, columns, past_x_ptr, past_B_ptr, past_dt_ptr,
    A, position, count, p, p_in, w,
    KIND: tl.constexpr, NHEADS: tl.constexpr, D_STATE: tl.constexpr, D_SSM: tl.constexpr, BC: tl.constexpr,
    WINDOW: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_AGE: tl.constexpr,
):  # fmt: skip
    """The rows p (P,) of a head, with its window folded in, as fields (P, BLOCK_W).

    count: inputs in the window, the last before `position`. The pointers are the head's, and the group's.
    """
    FIELDS: tl.constexpr = per_word(KIND)
    WORDS: tl.constexpr = (D_STATE + FIELDS - 1) // FIELDS
    words = load_words(codes_ptr, p, p_in, w, WORDS, BLOCK_W)
    scale = load_scale(scales_ptr, p, p_in, KIND)
    age = tl.arange(0, BLOCK_AGE)
    rings = (position + (2 * WINDOW - 1) - age) % WINDOW
    total = tl.sum(tl.load(past_dt_ptr + rings * NHEADS, mask=age < count, other=0.0), axis=0)
    scale *= tl.exp(A * total) * decoded_unit(KIND)
    fields = decode(words, KIND)
    state = ()
    for field in tl.static_range(FIELDS):
        part = fields[field] * scale[:, None]
        if columns is not None and is_scaled(KIND):
            part *= load_columns(columns, w, field, WORDS, D_STATE, BLOCK_W)[None, :]
        state += (part,)
    since = tl.zeros_like(total)
    if WINDOW <= 16:
        # Unrolled, the loads of all inputs are under way at once.
        for back in tl.static_range(WINDOW - 1):
            state, since = _add_input(
                state, since, back, count > back, A, position, past_x_ptr, past_B_ptr, past_dt_ptr, p, p_in,
                w, NHEADS, D_STATE, D_SSM, BC, WINDOW, FIELDS, WORDS, BLOCK_W,
            )  # fmt: skip
    else:
        for back in range(0, count):
            state, since = _add_input(
                state, since, back, count > back, A, position, past_x_ptr, past_B_ptr, past_dt_ptr, p, p_in,
                w, NHEADS, D_STATE, D_SSM, BC, WINDOW, FIELDS, WORDS, BLOCK_W,
            )  # fmt: skip
    return state


@triton.jit
def _add_input(
    state, since, back, live, A, position, past_x_ptr, past_B_ptr, past_dt_ptr, p, p_in, w,
    NHEADS: tl.constexpr, D_STATE: tl.constexpr, D_SSM: tl.constexpr, BC: tl.constexpr,
    WINDOW: tl.constexpr, FIELDS: tl.constexpr, WORDS: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Add the input of `back` + 1 tokens ago, where it is `live`; `since`: the sum of dt after it."""
    ring = (position + (WINDOW - 1) - back) % WINDOW
    past_dt = tl.where(live, tl.load(past_dt_ptr + ring * NHEADS), 0.0)
    past_x = tl.load(past_x_ptr + ring * D_SSM + p, mask=p_in, other=0.0).to(tl.float32)
    past_x *= past_dt * tl.exp(A * since)
    moved = ()
    for field in tl.static_range(FIELDS):
        past_B = load_columns(past_B_ptr + ring * BC, w, field, WORDS, D_STATE, BLOCK_W)
        moved += (state[field] + past_x[:, None] * past_B[None, :],)
    return moved, since + past_dt


def launch_pack(state: torch.Tensor, packed: PackedState) -> None:
    """Round `state` (slots, nheads, headdim, d_state) into the codes and scales of `packed`."""
    state = state if state.stride(-1) == 1 else state.contiguous()
    _launch(state, packed, None)


def launch_unpack(packed: PackedState, A: torch.Tensor) -> torch.Tensor:
    """`PackedState.unpack` with A (nheads,)."""
    nheads = packed.scales.shape[1]
    state = torch.empty(packed.slots, nheads, packed.headdim, packed.d_state, device=A.device)
    _launch(state, packed, A)
    return state


def _launch(state: torch.Tensor, packed: PackedState, A: torch.Tensor | None) -> None:
    """Pack where there is no A, else unpack."""
    slots, nheads, headdim, d_state = state.shape
    format, block_n = packed.format, max(8, triton.next_power_of_2(d_state))
    rows = min(max(4, 2048 // block_n), triton.next_power_of_2(headdim))
    with torch.cuda.device_of(state):
        _packed_state_kernel[(slots * nheads * triton.cdiv(headdim, rows),)](
            state, packed.codes, packed.scales, packed.x, packed.B, packed.dt, packed.position,
            packed.columns, head_table(format, headdim, d_state, state.device), A,
            first_key(format.seed), *state.stride()[:3], packed.codes.stride(0) // 16,
            packed.scales.stride(0), packed.x.stride(0), packed.B.stride(0), packed.dt.stride(0),
            NHEADS=nheads, HEADDIM=headdim, D_STATE=d_state, HEADS_PER_GROUP=nheads // packed.B.shape[2],
            WINDOW=format.window, KINDS=format.kinds, STOCHASTIC=format.rounding == "stochastic",
            PACK=A is None, BLOCK_P=rows, BLOCK_N=block_n, BLOCK_AGE=triton.next_power_of_2(format.window),
            INTERPRET=interpreting(), num_warps=1,
        )  # fmt: skip
