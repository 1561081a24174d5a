"""Triton kernel of `packed_selective_update`: a tile of channels replays its window from the packed state."""

import torch
import triton
import triton.language as tl

from mamba_kernels.backend import interpreting
from mamba_kernels.decode_norm_triton import inside
from mamba_kernels.packed_rows_triton import inverse_columns, load_columns, load_scale, load_words
from mamba_kernels.packed_state import PackedState
from mamba_kernels.state_codes import STATE_DTYPES, first_key
from mamba_kernels.state_codes_triton import (
    decode,
    decoded_unit,
    encode,
    is_scaled,
    per_word,
    rounding_key,
)
from mamba_kernels.triton_math import LOG2E, silu, softplus


@triton.jit(do_not_specialize=["seed"])
def _packed_selective_update_kernel(
    codes_ptr, scales_ptr, past_x_ptr, past_B_ptr, past_dt_ptr, position_ptr, columns_ptr,
    x_ptr, dt_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, dt_bias_ptr, out_ptr,
    seed, stride_codes, stride_scales, stride_past_x, stride_past_B, stride_past_dt, stride_x, stride_dt,
    stride_B, stride_C, stride_z, stride_out,
    DIM: tl.constexpr, D_STATE: tl.constexpr, WINDOW: tl.constexpr, KIND: tl.constexpr,
    STOCHASTIC: tl.constexpr, SOFTPLUS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """Program pid = batch * TILES + tile advances channels p of one sequence.

    p: BLOCK_P of DIM. stride_codes: in units of 16 bytes. A: (DIM, D_STATE), contiguous.
    """
    TILES: tl.constexpr = (DIM + BLOCK_P - 1) // BLOCK_P
    FIELDS: tl.constexpr = per_word(KIND)
    WORDS: tl.constexpr = (D_STATE + FIELDS - 1) // FIELDS
    BLOCK_W: tl.constexpr = BLOCK_N // FIELDS
    pid = tl.program_id(0)
    tile = pid % TILES
    batch = (pid // TILES).to(tl.int64)
    p = tile * BLOCK_P + tl.arange(0, BLOCK_P)
    p_in = inside(p, DIM, BLOCK_P)
    w = tl.arange(0, BLOCK_W)
    codes_ptr = codes_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + batch * stride_codes * 4
    scales_ptr += batch * stride_scales
    past_x_ptr += batch * stride_past_x
    past_B_ptr += batch * stride_past_B
    past_dt_ptr += batch * stride_past_dt
    B_ptr += batch * stride_B
    C_ptr += batch * stride_C

    words = load_words(codes_ptr, p, p_in, w, WORDS, BLOCK_W)
    scale = load_scale(scales_ptr, p, p_in, KIND) * decoded_unit(KIND)
    position = tl.load(position_ptr + batch)
    x_now = tl.load(x_ptr + batch * stride_x + p, mask=p_in, other=0.0)
    dt = tl.load(dt_ptr + batch * stride_dt + p, mask=p_in, other=0.0).to(tl.float32)
    if dt_bias_ptr is not None:
        dt += tl.load(dt_bias_ptr + p, mask=p_in, other=0.0).to(tl.float32)
    if SOFTPLUS:
        dt = softplus(dt)
    fields = decode(words, KIND)
    A = ()
    state = ()
    for field in tl.static_range(FIELDS):
        at = field * WORDS + w
        both_in = p_in[:, None] & ((w < WORDS) & (at < D_STATE))[None, :]
        A_ptrs = A_ptr + (p * D_STATE)[:, None] + at[None, :]
        A += (tl.load(A_ptrs, mask=both_in, other=0.0).to(tl.float32) * LOG2E,)
        part = fields[field] * scale[:, None]
        if columns_ptr is not None and is_scaled(KIND):
            part *= load_columns(columns_ptr, w, field, WORDS, D_STATE, BLOCK_W)[None, :]
        state += (part,)

    # The inputs that the stored state lacks, the oldest first.
    count = position % WINDOW
    for step in range(0, count):
        ring = (position - count + step) % WINDOW
        past_dt = tl.load(past_dt_ptr + ring * DIM + p, mask=p_in, other=0.0)
        past_x = tl.load(past_x_ptr + ring * DIM + p, mask=p_in, other=0.0).to(tl.float32)
        moved = ()
        for field in tl.static_range(FIELDS):
            B = load_columns(past_B_ptr + ring * D_STATE, w, field, WORDS, D_STATE, BLOCK_W)
            decayed = state[field] * tl.exp2(past_dt[:, None] * A[field])
            moved += (decayed + (past_dt * past_x)[:, None] * B[None, :],)
        state = moved
    x = x_now.to(tl.float32)
    products = tl.zeros((BLOCK_P, BLOCK_W), tl.float32)
    moved = ()
    rounded = ()
    for field in tl.static_range(FIELDS):
        B = load_columns(B_ptr, w, field, WORDS, D_STATE, BLOCK_W)
        part = state[field] * tl.exp2(dt[:, None] * A[field]) + (dt * x)[:, None] * B[None, :]
        products += part * load_columns(C_ptr, w, field, WORDS, D_STATE, BLOCK_W)[None, :]
        if columns_ptr is not None and is_scaled(KIND):
            part *= inverse_columns(columns_ptr, w, field, WORDS, D_STATE, BLOCK_W)[None, :]
        rounded += (part,)
    if count == WINDOW - 1:
        key = rounding_key(seed, position, tile * 0)
        words, scale = encode(rounded, p, w, key, KIND, WORDS, STOCHASTIC, INTERPRET)
        word_in = p_in[:, None] & inside(w, WORDS, BLOCK_W)[None, :]
        tl.store(codes_ptr + (p * WORDS)[:, None] + w[None, :], words, mask=word_in)
        if is_scaled(KIND):
            tl.store(scales_ptr + p, scale, mask=p_in)

    tl.store(past_x_ptr + count * DIM + p, x_now.to(past_x_ptr.dtype.element_ty), mask=p_in)
    tl.store(past_dt_ptr + count * DIM + p, dt, mask=p_in)
    if tile == 0:
        column = tl.arange(0, BLOCK_N)
        B_now = tl.load(B_ptr + column, mask=column < D_STATE, other=0.0).to(past_B_ptr.dtype.element_ty)
        tl.store(past_B_ptr + count * D_STATE + column, B_now, mask=column < D_STATE)
    y = tl.sum(products, axis=1)
    if D_ptr is not None:
        y += tl.load(D_ptr + p, mask=p_in, other=0.0).to(tl.float32) * x
    if z_ptr is not None:
        y *= silu(tl.load(z_ptr + batch * stride_z + p, mask=p_in, other=0.0).to(tl.float32))
    tl.store(out_ptr + batch * stride_out + p, y.to(out_ptr.dtype.element_ty), mask=p_in)


def launch_packed_selective_update(
    packed: PackedState,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    dt_softplus: bool,
) -> torch.Tensor:
    """Run the kernel; see `packed_selective_update` for the shapes."""
    batch, dim = x.shape
    format, d_state = packed.format, packed.d_state
    x, dt, B, C = (t if t.stride(1) == 1 else t.contiguous() for t in (x, dt, B, C))
    z = z if z is None or z.stride(1) == 1 else z.contiguous()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    block_n = max(8, triton.next_power_of_2(d_state))
    rows = min(max(4, 1024 // block_n), triton.next_power_of_2(dim))
    with torch.cuda.device_of(x):
        _packed_selective_update_kernel[(batch * triton.cdiv(dim, rows),)](
            packed.codes, packed.scales, packed.x, packed.B, packed.dt, packed.position, packed.columns,
            x, dt, A.contiguous(), B, C, D, z, dt_bias, out,
            first_key(format.seed), packed.codes.stride(0) // 16, packed.scales.stride(0),
            packed.x.stride(0), packed.B.stride(0), packed.dt.stride(0), x.stride(0), dt.stride(0),
            B.stride(0), C.stride(0), 0 if z is None else z.stride(0), out.stride(0),
            DIM=dim, D_STATE=d_state, WINDOW=format.window, KIND=STATE_DTYPES.index(format.heads[0]),
            STOCHASTIC=format.rounding == "stochastic", SOFTPLUS=dt_softplus, BLOCK_P=rows,
            BLOCK_N=block_n, INTERPRET=interpreting(), num_warps=1,
        )  # fmt: skip
    return out
