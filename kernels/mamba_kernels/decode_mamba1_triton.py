"""Triton kernel of the decode step's Mamba-1 recurrence, with dt_proj ahead of it and the gate behind it.

x_proj is the projection of decode_linear_triton, in a configuration of its own.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from mamba_kernels.decode_linear_triton import launch_linear
from mamba_kernels.decode_norm import Normed
from mamba_kernels.decode_norm_triton import (
    early_start,
    inside,
    late_start,
    start_next,
    unpack,
    wait_for_previous,
)
from mamba_kernels.triton_math import LOG2E, silu, softplus


@triton.jit
def _rstd(x, SIZE: tl.constexpr, eps):
    """1 / RMS of a vector that is zero past SIZE."""
    return tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)


@triton.jit
def _load_tile(
    ptr, p, p_in, STRIDE_P: tl.constexpr, STRIDE_N: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Rows p (P,) of a matrix of WIDTH columns, as (P, BLOCK_N); PACKED: as int32 words, see `unpack`."""
    if PACKED:
        n = tl.arange(0, BLOCK_N // 2)
        ptrs = ptr.to(tl.pointer_type(tl.int32), bitcast=True) + p[:, None] * (STRIDE_P // 2) + n[None, :]
        mask = p_in[:, None] & inside(n, WIDTH // 2, BLOCK_N // 2)[None, :]
        return tl.load(ptrs, mask=mask, other=0)
    else:
        n = tl.arange(0, BLOCK_N).to(p.dtype)
        ptrs = ptr + p[:, None] * STRIDE_P + n[None, :] * STRIDE_N
        mask = p_in[:, None] & inside(n, WIDTH, BLOCK_N)[None, :]
        return tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def _widen(tile, ELEMENT: tl.constexpr, PACKED: tl.constexpr):
    """What `_load_tile` loaded, in float32."""
    if PACKED:
        return unpack(tile, ELEMENT)
    else:
        return tile.to(tl.float32)


@triton.jit(do_not_specialize=["batch"])
def _mamba1_ssm_kernel(
    xz_ptr, dtBC_ptr, dt_ptr, state_ptr, slots_ptr, dt_weight_ptr, dt_bias_ptr, A_ptr, D_ptr, out_ptr,
    batch, eps, stride_xz, stride_dtBC, stride_dt, stride_slot, stride_out,
    D_INNER: tl.constexpr, D_STATE: tl.constexpr, DT_RANK: tl.constexpr,
    STATE_P: tl.constexpr, STATE_N: tl.constexpr, INDEX: tl.constexpr, NORM: tl.constexpr,
    PACKED_STATE: tl.constexpr, PACKED_WEIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (tile of BLOCK_P channels p, tile of BLOCK_M rows m of the batch): state[slot[m], p, :].

    The channels' rows of dt_proj (BLOCK_P, BLOCK_R >= DT_RANK) and of A, and the states of all BLOCK_M rows,
    are under way before the kernel ahead ends. dt_ptr, where given, holds dt_proj's product, and its weight
    is not read. The strides within a state are constants, INDEX is the type of offsets in it.
    """
    start_next(PDL)
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    p_in = inside(p, D_INNER, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    n_in = inside(n, D_STATE, BLOCK_N)
    r = tl.arange(0, BLOCK_R)
    first = tl.program_id(1) * BLOCK_M
    STATE: tl.constexpr = state_ptr.dtype.element_ty
    WEIGHT: tl.constexpr = dt_weight_ptr.dtype.element_ty

    states = ()
    tiles = ()  # where they came from
    lives = ()  # not past the batch, and not padding
    for i in tl.static_range(BLOCK_M):
        slot = (first + i).to(tl.int64)
        live = slot + tl.zeros((1,), tl.int64) < batch
        if slots_ptr is not None:
            slot = tl.load(slots_ptr + first + i, mask=first + i < batch, other=-1).to(tl.int64)
            live = slot + tl.zeros((1,), tl.int64) >= 0
        tiles += (state_ptr + slot * stride_slot,)
        lives += (live,)
        states += (
            _load_tile(
                tiles[i], p.to(INDEX), p_in & live, STATE_P, STATE_N, D_STATE, BLOCK_N, PACKED_STATE
            ),
        )  # fmt: skip
    if dt_ptr is None:
        weight = _load_tile(dt_weight_ptr, p, p_in, DT_RANK, 1, DT_RANK, BLOCK_R, PACKED_WEIGHT)
    A = _load_tile(A_ptr, p, p_in, D_STATE, 1, D_STATE, BLOCK_N, False)
    dt_bias = tl.load(dt_bias_ptr + p, mask=p_in, other=0.0)
    D = tl.load(D_ptr + p, mask=p_in, other=0.0)

    wait_for_previous(PDL)
    # All rows' inputs before any arithmetic: behind the first row's stores they would be waited for again.
    rows = ()
    xs = ()
    zs = ()
    Bs = ()
    Cs = ()
    products = ()  # dt_proj's
    low_ranks = ()  # its argument
    for i in tl.static_range(BLOCK_M):
        m = tl.minimum(first + i, batch - 1).to(tl.int64)
        row = dtBC_ptr + m * stride_dtBC
        rows += (m,)
        xs += (tl.load(xz_ptr + m * stride_xz + p, mask=p_in, other=0.0),)
        zs += (tl.load(xz_ptr + m * stride_xz + D_INNER + p, mask=p_in, other=0.0),)
        Bs += (tl.load(row + DT_RANK + n, mask=n_in, other=0.0),)
        Cs += (tl.load(row + DT_RANK + D_STATE + n, mask=n_in, other=0.0),)
        if dt_ptr is not None:
            products += (tl.load(dt_ptr + m * stride_dt + p, mask=p_in, other=0.0),)
        if dt_ptr is None or NORM:
            low_ranks += (tl.load(row + r, mask=inside(r, DT_RANK, BLOCK_R), other=0.0).to(tl.float32),)
    for i in tl.static_range(BLOCK_M):
        x = xs[i].to(tl.float32)
        B = Bs[i].to(tl.float32)
        C = Cs[i].to(tl.float32)
        if dt_ptr is None:
            dt = tl.sum(_widen(weight, WEIGHT, PACKED_WEIGHT) * low_ranks[i][None, :], axis=1)
        else:
            dt = products[i].to(tl.float32)
        if NORM:  # dt_proj is linear: its product scales as its argument would have
            dt *= _rstd(low_ranks[i], DT_RANK, eps)
            B *= _rstd(B, D_STATE, eps)
            C *= _rstd(C, D_STATE, eps)
        dt = softplus(dt + dt_bias.to(tl.float32))
        decay = tl.exp2((dt * LOG2E)[:, None] * A.to(tl.float32))
        state = _widen(states[i], STATE, PACKED_STATE) * decay + (dt * x)[:, None] * B[None, :]
        state_ptrs = tiles[i] + p.to(INDEX)[:, None] * STATE_P + n.to(INDEX)[None, :] * STATE_N
        tl.store(state_ptrs, state.to(STATE), mask=(p_in & lives[i])[:, None] & n_in[None, :])
        y = tl.sum(state * C[None, :], axis=1) + D.to(tl.float32) * x
        y = tl.where(lives[i], y * silu(zs[i].to(tl.float32)), 0.0)
        m_in = first + i + tl.zeros((1,), tl.int32) < batch
        tl.store(out_ptr + rows[i] * stride_out + p, y.to(out_ptr.dtype.element_ty), mask=p_in & m_in)


def config_for(batch: int, d_state: int, multiplies: bool) -> dict[str, int]:
    """Block sizes of the recurrence.

    multiplies: dt_proj as well: few rows of the batch, so tiles of 8 channels, to have programs for every
    processor. Else 2 KB of each of 4 rows' fp32 states under way in a warp, as A is read once for them.
    Fewer channels where their states would not fit the registers.
    """
    block_n = triton.next_power_of_2(d_state)
    if multiplies:
        return {"BLOCK_M": min(2, batch), "BLOCK_P": min(8, max(1, 1024 // block_n)), "num_warps": 1}
    return {"BLOCK_M": 4, "BLOCK_P": max(1, 512 // block_n), "num_warps": 1}


def launch_mamba1_ssm_step(
    xz: torch.Tensor,
    dtBC: torch.Tensor,
    dt: torch.Tensor | None,
    ssm_state: torch.Tensor,
    dt_weight: torch.Tensor,
    dt_bias: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    out: torch.Tensor,
    *,
    norm_eps: float | None,
    slots: torch.Tensor | None,
    pdl: bool,
    config: dict[str, Any] | None,
) -> None:
    """Advance the state of every row of xz; dt: dt_proj's product, or None where the kernel multiplies."""
    batch = xz.shape[0]
    _, d_inner, d_state = ssm_state.shape
    dt_rank = dt_weight.shape[1]
    config = config or config_for(batch, d_state, dt is None)
    stride_slot, stride_p, stride_n = ssm_state.stride()
    even = [ssm_state.storage_offset(), stride_slot, stride_p, d_state]
    packed_state = ssm_state.dtype.itemsize == 2 and stride_n == 1 and all(size % 2 == 0 for size in even)
    even = [dt_weight.storage_offset(), dt_rank]
    packed_weight = dt_weight.dtype.itemsize == 2 and all(size % 2 == 0 for size in even)
    furthest = 2 * (d_inner * stride_p + d_state * stride_n)  # blocks may pass the end, by less than as much
    start = early_start if dt is None else late_start
    grid = (triton.cdiv(d_inner, config["BLOCK_P"]), triton.cdiv(batch, config["BLOCK_M"]))
    with torch.cuda.device_of(xz):
        _mamba1_ssm_kernel[grid](
            xz, dtBC, dt, ssm_state, slots, dt_weight, dt_bias, A, D, out,
            batch, norm_eps or 0.0, xz.stride(0), dtBC.stride(0), 0 if dt is None else dt.stride(0),
            stride_slot, out.stride(0),
            D_INNER=d_inner, D_STATE=d_state, DT_RANK=dt_rank, STATE_P=stride_p, STATE_N=stride_n,
            INDEX=tl.int32 if furthest < 2**31 else tl.int64, NORM=norm_eps is not None,
            PACKED_STATE=packed_state, PACKED_WEIGHT=packed_weight,
            BLOCK_N=triton.next_power_of_2(d_state), BLOCK_R=triton.next_power_of_2(dt_rank),
            **config, **start(pdl, xz),
        )  # fmt: skip


def x_proj_config_for(batch: int, d_inner: int, dtype: torch.dtype) -> dict[str, int]:
    """Block sizes of x_proj: it has few outputs, so a program has one or two, with more warps for a long sum.

    Measured in the 130m and 2.8b shapes at batch 1: 2.3 and 4.1 us from x_proj to the gate.
    """
    warps = 2 if d_inner <= 2048 else 4
    block_k = warps * (512 // dtype.itemsize)
    return {
        "BLOCK_M": min(8, triton.next_power_of_2(batch)), "BLOCK_N": 2 if d_inner <= 2048 else 1,
        "BLOCK_K": block_k,
        "PREFETCH": min(triton.cdiv(d_inner, block_k), 8), "num_warps": warps,
    }  # fmt: skip


def launch_x_proj(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, pdl: bool, config: dict[str, Any] | None
) -> None:
    """Fill out (batch, rows of weight) with x @ weight.T."""
    config = config or x_proj_config_for(*x.shape, weight.dtype)
    launch_linear(Normed(x, None, 0.0), weight, None, out, pdl=pdl, config=config)
