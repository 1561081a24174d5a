"""Triton kernel of the decode step's recurrence: state update, skip, gate and the next `Normed`."""

from typing import Any

import torch
import triton
import triton.language as tl

from mamba_kernels.decode_norm_triton import early_start, inside, start_next, unpack, wait_for_previous
from mamba_kernels.triton_launch import PROCESSORS
from mamba_kernels.triton_math import silu, softplus


@triton.jit
def _ssm_step_kernel(
    zxbcdt_ptr, ssm_state_ptr, slots_ptr, dt_bias_ptr, A_log_ptr, D_ptr, norm_weight_ptr,
    scaled_ptr, squares_ptr,
    dt_min, dt_max, stride_in, stride_slot, stride_head, stride_D_head, stride_scaled, stride_squares,
    NHEADS: tl.constexpr, HEADDIM: tl.constexpr, D_STATE: tl.constexpr, HEADS_PER_GROUP: tl.constexpr,
    STATE_P: tl.constexpr, STATE_N: tl.constexpr, D_P: tl.constexpr, INDEX: tl.constexpr,
    NORM: tl.constexpr, PACKED: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program pid = (batch * NHEADS + head) * TILES + tile advances state[slot, head, p, :].

    p: BLOCK_P rows of HEADDIM, n: BLOCK_N >= D_STATE columns. A row of zxbcdt is z, x (D_SSM each), B, C
    (groups * D_STATE each), dt (NHEADS). The strides within a head are constants (STATE_P, ...), so that
    the loads of a tile have one address between them and follow each other at once. INDEX: the type of
    offsets within a head. NORM: "none", "gate_first" or "norm_first". PACKED: a 16-bit state is read as
    int32 words, see `unpack`.
    """
    TILES: tl.constexpr = (HEADDIM + BLOCK_P - 1) // BLOCK_P
    D_SSM: tl.constexpr = NHEADS * HEADDIM
    BC: tl.constexpr = NHEADS // HEADS_PER_GROUP * D_STATE
    start_next(PDL)
    pid = tl.program_id(0)
    tile = pid % TILES
    head = pid // TILES % NHEADS
    batch = (pid // (TILES * NHEADS)).to(tl.int64)
    p = tile * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    p_in = inside(p, HEADDIM, BLOCK_P)
    n_in = inside(n, D_STATE, BLOCK_N)
    both_in = p_in[:, None] & n_in[None, :]
    channel = head * HEADDIM + p

    slot = batch
    live = tl.full((1, 1), 1, tl.int1)
    if slots_ptr is not None:
        slot = tl.load(slots_ptr + batch).to(tl.int64)
        live = slot + tl.zeros((1, 1), tl.int64) >= 0  # a padding row has no state
    both_in = both_in & live
    state_ptr = ssm_state_ptr + slot * stride_slot + head.to(tl.int64) * stride_head
    state_ptrs = state_ptr + p.to(INDEX)[:, None] * STATE_P + n.to(INDEX)[None, :] * STATE_N
    if PACKED:
        w = tl.arange(0, BLOCK_N // 2)
        word_ptrs = state_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        word_ptrs += p.to(INDEX)[:, None] * (STATE_P // 2) + w[None, :]
        words_in = p_in[:, None] & inside(w, D_STATE // 2, BLOCK_N // 2)[None, :]
        words = tl.load(word_ptrs, mask=words_in & live, other=0)
    else:
        state = tl.load(state_ptrs, mask=both_in, other=0.0)
    A_log = tl.load(A_log_ptr + head)
    dt_bias = tl.load(dt_bias_ptr + head)
    D = tl.load(D_ptr + head * stride_D_head + p * D_P, mask=p_in, other=0.0)
    if NORM != "none":
        norm_weight = tl.load(norm_weight_ptr + channel, mask=p_in, other=0.0)

    wait_for_previous(PDL)
    group = head // HEADS_PER_GROUP
    row = zxbcdt_ptr + batch * stride_in
    B_row = row + 2 * D_SSM
    C_row = B_row + BC
    dt_row = C_row + BC
    dt = tl.load(dt_row + head).to(tl.float32)
    x = tl.load(row + D_SSM + channel, mask=p_in, other=0.0).to(tl.float32)
    B = tl.load(B_row + group * D_STATE + n, mask=n_in, other=0.0).to(tl.float32)
    C = tl.load(C_row + group * D_STATE + n, mask=n_in, other=0.0).to(tl.float32)
    z = tl.load(row + channel, mask=p_in, other=0.0).to(tl.float32)

    dt = tl.minimum(tl.maximum(softplus(dt + dt_bias.to(tl.float32)), dt_min), dt_max)
    decay = tl.exp(dt * -tl.exp(A_log.to(tl.float32)))
    if PACKED:
        state = unpack(words, ssm_state_ptr.dtype.element_ty)
    state = state.to(tl.float32) * decay + (dt * x)[:, None] * B[None, :]
    tl.store(state_ptrs, state.to(ssm_state_ptr.dtype.element_ty), mask=both_in)

    y = tl.sum(state * C[None, :], axis=1) + D.to(tl.float32) * x
    if slots_ptr is not None:
        y = tl.where(slot >= 0, y, 0.0)
    gated = y * silu(z)
    if NORM == "none":
        scaled = gated
    else:
        scaled = gated * norm_weight.to(tl.float32)
        normed = y if NORM == "norm_first" else gated
        square = tl.sum(tl.where(p_in, normed * normed, 0.0), axis=0)
        tl.store(squares_ptr + batch * stride_squares + head * TILES + tile, square)
    tl.store(scaled_ptr + batch * stride_scaled + channel, scaled.to(scaled_ptr.dtype.element_ty), mask=p_in)


def config_for(batch: int, nheads: int, headdim: int, d_state: int) -> dict[str, int]:
    """Block sizes: tiles of 2048 state elements, at least 4 rows and never more rows than a head has.

    One warp a tile where there are enough of them to fill the device; else two, as the time is then that of
    one warp's instructions; tiles of a quarter where there would not be one for each processor.
    What two warps share they do not hold twice: one would read what the other updates in place.
    """
    block_n, most = triton.next_power_of_2(d_state), triton.next_power_of_2(headdim)

    def tiles(rows: int) -> int:
        return batch * nheads * triton.cdiv(headdim, rows)

    rows = min(max(4, 2048 // block_n), most)
    if tiles(rows) < PROCESSORS:
        return {"BLOCK_P": min(max(4, rows // 4), most), "num_warps": 1}
    return {"BLOCK_P": rows, "num_warps": 1 if tiles(rows) > 2000 or rows * block_n < 64 else 2}


def launch_ssm_step(
    zxbcdt: torch.Tensor,
    ssm_state: torch.Tensor,
    dt_bias: torch.Tensor,
    A_log: torch.Tensor,
    D: torch.Tensor,
    norm_weight: torch.Tensor | None,
    scaled: torch.Tensor,
    squares: torch.Tensor | None,
    *,
    ngroups: int,
    dt_limit: tuple[float, float],
    norm_before_gate: bool,
    slots: torch.Tensor | None,
    pdl: bool,
    config: dict[str, Any] | None,
) -> int:
    """Advance the state of every row of zxbcdt; return how many parts of squares a row has."""
    batch = zxbcdt.shape[0]
    _, nheads, headdim, d_state = ssm_state.shape
    config = config or config_for(batch, nheads, headdim, d_state)
    tiles = triton.cdiv(headdim, config["BLOCK_P"])
    *_, stride_p, stride_n = ssm_state.stride()
    even = [ssm_state.storage_offset(), *ssm_state.stride()[:3], d_state]
    packed = ssm_state.dtype.itemsize == 2 and stride_n == 1 and all(size % 2 == 0 for size in even)
    norm = "none" if norm_weight is None else "norm_first" if norm_before_gate else "gate_first"
    furthest = 2 * (headdim * stride_p + d_state * stride_n)  # blocks may pass the end, by less than as much
    with torch.cuda.device_of(zxbcdt):
        _ssm_step_kernel[(batch * nheads * tiles,)](
            zxbcdt, ssm_state, slots, dt_bias, A_log, D, norm_weight, scaled, squares,
            *dt_limit, zxbcdt.stride(0), *ssm_state.stride()[:2], D.stride(0),
            scaled.stride(0), 0 if squares is None else squares.stride(0),
            NHEADS=nheads, HEADDIM=headdim, D_STATE=d_state, HEADS_PER_GROUP=nheads // ngroups,
            STATE_P=stride_p, STATE_N=stride_n, D_P=D.stride(1) if D.dim() == 2 else 0,
            INDEX=tl.int32 if furthest < 2**31 else tl.int64, NORM=norm, PACKED=packed,
            BLOCK_N=triton.next_power_of_2(d_state), **config, **early_start(pdl, zxbcdt),
        )  # fmt: skip
    return nheads * tiles
