"""Triton kernel of the selective scan, forward.

A program walks one block of channels through the whole sequence, a tile of BLOCK_T tokens at a time, with
the state in registers. It multiplies and adds token after token, as the equation reads, so there is no
parallel scan's extra work and nothing but decays is ever multiplied together.

Every tile with states has the shape (tokens, ROWS, channels, LANES), and the shape is the layout: Triton
gives the last axes to the lanes and then the warps of a program, and the first to registers. With
ROWS * LANES >= d_state and channels = 32 * num_warps / LANES, a thread holds ROWS states of one channel at
all the tile's tokens. So taking one token out of a tile (`token_of`), which the loop over the tokens does,
is free; the sum over the states is ROWS additions and log2(LANES) shuffles.

What has a time axis is loaded a tile ahead and becomes float32 there, not where it is used: Triton moves
a change of layout to the narrower side of a conversion, and with it the softplus would be computed by
every lane that needs it.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from mamba_kernels.discretization_triton import (
    cmul,
    decay_of,
    gain_of,
    load_pair,
    real_of_product,
    store_pair,
)
from mamba_kernels.selective_scan import ScanInputs
from mamba_kernels.triton_math import silu, softplus

# Tokens from one saved state to the next. A multiple of every BLOCK_T.
START_EVERY = 128


@triton.jit
def token_of(tile, tokens, t: tl.constexpr):
    """tile[t], for a tile whose tokens lie in registers. As integers, for x + 0 is x for the compiler."""
    bits = tl.where(tokens == t, tile.to(tl.int32, bitcast=True), 0)
    return tl.sum(bits, axis=0).to(tl.float32, bitcast=True)


@triton.jit
def as_token(state, tokens):
    """state (ROWS, channels, LANES), laid out as one token of a tile.

    A loaded state would keep the layout of its load, and with it the loop over the tokens would.
    """
    return token_of(tl.where(tokens == 0, state[None], 0.0), tokens, 0)


@triton.jit
def drive_of(
    u, delta, A_re, A_im, B_re, B_im, RULE: tl.constexpr, COMPLEX: tl.constexpr
):  # fmt: skip
    """gain * B * u; u, delta (tokens, 1, channels, 1)."""
    if RULE == "mamba":
        re = (delta * u) * B_re
        im = (delta * u) * B_im
    elif RULE == "dirac":
        re = u * B_re
        im = u * B_im
    else:
        gain_re, gain_im, _, _, _, _ = gain_of(delta, A_re, A_im, RULE, COMPLEX)
        re, im = cmul(gain_re, gain_im, B_re, B_im, COMPLEX)
        re *= u
        im *= u
    return re, im


@triton.jit
def advance(
    h_re, h_im, decay_re, decay_im, drive_re, drive_im, tokens,
    BLOCK_T: tl.constexpr, COMPLEX: tl.constexpr,
):  # fmt: skip
    """Step the state (ROWS, channels, LANES) through a tile.

    Returns the states after each token, those before each, and the last, as pairs.
    """
    after_re = drive_re
    after_im = drive_im
    before_re = drive_re
    before_im = drive_im
    for t in tl.static_range(BLOCK_T):
        here = tokens == t
        before_re = tl.where(here, h_re[None], before_re)
        a_re = token_of(decay_re, tokens, t)
        re = a_re * h_re + token_of(drive_re, tokens, t)
        if COMPLEX:
            before_im = tl.where(here, h_im[None], before_im)
            a_im = token_of(decay_im, tokens, t)
            re -= a_im * h_im
            h_im = a_re * h_im + a_im * h_re + token_of(drive_im, tokens, t)
            after_im = tl.where(here, h_im[None], after_im)
        h_re = re
        after_re = tl.where(here, h_re[None], after_re)
    return after_re, after_im, before_re, before_im, h_re, h_im


@triton.jit
def _scan_kernel(
    u_ptr, delta_ptr, deltaA_ptr, z_ptr, A_ptr, B_ptr, C_ptr, D_ptr, delta_bias_ptr, initial_ptr,
    out_ptr, last_ptr, starts_ptr,
    dim, seqlen, d_state, group_channels, group_blocks, blocks, starts,
    stride_ub, stride_uc, stride_ut, stride_db, stride_dc, stride_dt,
    stride_ab, stride_ac, stride_at, stride_zb, stride_zc, stride_zt,
    stride_ob, stride_oc, stride_ot,
    stride_Bb, stride_Bg, stride_Bn, stride_Bt, stride_Cb, stride_Cg, stride_Cn, stride_Ct,
    RULE: tl.constexpr, COMPLEX: tl.constexpr, SOFTPLUS: tl.constexpr,
    VARYING_B: tl.constexpr, VARYING_C: tl.constexpr,
    BLOCK_T: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr, LANES: tl.constexpr,
    START_EVERY: tl.constexpr,
):  # fmt: skip
    """Program pid = (batch * groups + group) * group_blocks + block: BLOCK_C channels of one group.

    t: (BLOCK_T,) tokens of a tile, c: (BLOCK_C,) channels, n: (ROWS, LANES) states.
    """
    pid = tl.program_id(0)
    block = pid % blocks
    batch = (pid // blocks).to(tl.int64)
    group = (block // group_blocks).to(tl.int64)
    c_in_group = block % group_blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    c_in = c_in_group < group_channels
    c = group * group_channels + c_in_group
    n = tl.arange(0, ROWS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    n_in = n < d_state
    t = tl.arange(0, BLOCK_T)
    tokens = t[:, None, None, None]
    PARTS: tl.constexpr = 2 if COMPLEX else 1

    state_in = n_in[:, None, :] & c_in[None, :, None]
    state = PARTS * (c[None, :, None] * d_state + n[:, None, :])
    h_re = tl.zeros((ROWS, BLOCK_C, LANES), tl.float32)
    h_im = h_re
    if initial_ptr is not None:
        h_re, h_im = load_pair(initial_ptr + batch * dim * d_state * PARTS + state, 1, state_in, COMPLEX)
        h_re = as_token(h_re, tokens)
        h_im = as_token(h_im, tokens)
    A_re, A_im = load_pair(A_ptr + state, 1, state_in, COMPLEX)
    A_re = A_re[None]
    A_im = A_im[None]
    if delta_bias_ptr is not None:
        delta_bias = tl.load(delta_bias_ptr + c, mask=c_in, other=0.0).to(tl.float32)[None, :]
    if D_ptr is not None:
        D = tl.load(D_ptr + c, mask=c_in, other=0.0).to(tl.float32)[None, :]

    t64 = t.to(tl.int64)
    u_ptrs = u_ptr + batch * stride_ub + c[None, :] * stride_uc + t64[:, None] * stride_ut
    delta_ptrs = delta_ptr + batch * stride_db + c[None, :] * stride_dc + t64[:, None] * stride_dt
    out_ptrs = out_ptr + batch * stride_ob + c[None, :] * stride_oc + t64[:, None] * stride_ot
    first_in = (t < seqlen)[:, None] & c_in[None, :]
    u_next = tl.load(u_ptrs, mask=first_in, other=0.0).to(tl.float32)
    delta_next = tl.load(delta_ptrs, mask=first_in, other=0.0).to(tl.float32)
    if deltaA_ptr is not None:
        deltaA_ptrs = deltaA_ptr + batch * stride_ab + c[None, :] * stride_ac + t64[:, None] * stride_at
        deltaA_next = tl.load(deltaA_ptrs, mask=first_in, other=0.0).to(tl.float32)
    if z_ptr is not None:
        z_ptrs = z_ptr + batch * stride_zb + c[None, :] * stride_zc + t64[:, None] * stride_zt
        z_next = tl.load(z_ptrs, mask=first_in, other=0.0).to(tl.float32)
    n64 = n.to(tl.int64)[None]
    first_n_in = (t < seqlen)[:, None, None] & n_in[None]
    if VARYING_B:
        B_ptrs = B_ptr + batch * stride_Bb + group * stride_Bg + n64 * stride_Bn
        B_ptrs += t64[:, None, None] * (PARTS * stride_Bt)
        B_next_re, B_next_im = load_pair(B_ptrs, stride_Bt, first_n_in, COMPLEX)
    else:
        B_re, B_im = load_pair(B_ptr + state, 1, state_in, COMPLEX)
        B_re = B_re[None]
        B_im = B_im[None]
    if VARYING_C:
        C_ptrs = C_ptr + batch * stride_Cb + group * stride_Cg + n64 * stride_Cn
        C_ptrs += t64[:, None, None] * (PARTS * stride_Ct)
        C_next_re, C_next_im = load_pair(C_ptrs, stride_Ct, first_n_in, COMPLEX)
    else:
        C_re, C_im = load_pair(C_ptr + state, 1, state_in, COMPLEX)
        C_re = C_re[None]
        C_im = C_im[None]

    for start in range(0, seqlen, BLOCK_T):
        if starts_ptr is not None:
            if start % START_EVERY == 0:
                saved = batch * starts + start // START_EVERY
                store_pair(
                    starts_ptr + saved * dim * d_state * PARTS + state, 1, h_re, h_im, state_in, COMPLEX
                )
        u = u_next
        delta = delta_next
        ahead = tl.cast(start + BLOCK_T, tl.int64)
        t_ahead = start + BLOCK_T + t < seqlen
        ahead_in = t_ahead[:, None] & c_in[None, :]
        u_next = tl.load(u_ptrs + ahead * stride_ut, mask=ahead_in, other=0.0).to(tl.float32)
        delta_next = tl.load(delta_ptrs + ahead * stride_dt, mask=ahead_in, other=0.0).to(tl.float32)
        if deltaA_ptr is not None:
            deltaA = deltaA_next
            deltaA_next = tl.load(deltaA_ptrs + ahead * stride_at, mask=ahead_in, other=0.0).to(tl.float32)
        if z_ptr is not None:
            z = z_next
            z_next = tl.load(z_ptrs + ahead * stride_zt, mask=ahead_in, other=0.0).to(tl.float32)
        ahead_n_in = t_ahead[:, None, None] & n_in[None]
        if VARYING_B:
            B_re = B_next_re[:, :, None, :]
            B_im = B_next_im[:, :, None, :]
            B_next_re, B_next_im = load_pair(
                B_ptrs + ahead * (PARTS * stride_Bt), stride_Bt, ahead_n_in, COMPLEX
            )
        if VARYING_C:
            C_re = C_next_re[:, :, None, :]
            C_im = C_next_im[:, :, None, :]
            C_next_re, C_next_im = load_pair(
                C_ptrs + ahead * (PARTS * stride_Ct), stride_Ct, ahead_n_in, COMPLEX
            )

        if delta_bias_ptr is not None:
            delta += delta_bias
        if SOFTPLUS:
            delta = softplus(delta)
        # A token past the end must leave the state alone: no step, no input.
        delta = tl.where((start + t < seqlen)[:, None], delta, 0.0)
        step = delta[:, None, :, None]
        decay_step = step
        if deltaA_ptr is not None:
            decay_step = deltaA[:, None, :, None]
        decay_re, decay_im = decay_of(decay_step, A_re, A_im, RULE, COMPLEX)
        drive_re, drive_im = drive_of(u[:, None, :, None], step, A_re, A_im, B_re, B_im, RULE, COMPLEX)
        h_all_re, h_all_im, _, _, h_re, h_im = advance(
            h_re, h_im, decay_re, decay_im, drive_re, drive_im, tokens, BLOCK_T, COMPLEX
        )
        y = tl.sum(tl.sum(real_of_product(C_re, C_im, h_all_re, h_all_im, COMPLEX), axis=1), axis=2)
        if COMPLEX:
            y *= 2.0
        if D_ptr is not None:
            y += D * u
        if z_ptr is not None:
            y *= silu(z)
        in_tile = (start + t < seqlen)[:, None] & c_in[None, :]
        now = tl.cast(start, tl.int64)
        tl.store(out_ptrs + now * stride_ot, y.to(out_ptr.dtype.element_ty), mask=in_tile)

    store_pair(last_ptr + batch * dim * d_state * PARTS + state, 1, h_re, h_im, state_in, COMPLEX)


def config_for(batch: int, dim: int, d_state: int, is_complex: bool) -> dict[str, int]:
    """Block sizes: BLOCK_T tokens a tile, and LANES lanes of a warp that share a channel's states.

    More lanes to a channel make more, lighter warps: what a small batch needs, as a warp walks through the
    whole sequence. A thread holds at most 4 states (2 complex ones) of a channel, at 16 tokens.
    """
    states = triton.next_power_of_2(d_state)
    held = 2 if is_complex else 4
    lanes = min(32, max(1, states // held))
    if batch * dim < 4096:
        lanes = min(32, states, 2 * lanes)
    rows = states // lanes
    return {"BLOCK_T": max(1, min(16, 16 * held // rows)), "LANES": lanes, "num_warps": 1}


def kernel_arguments(inputs: ScanInputs, config: dict[str, int]) -> tuple[tuple[int], dict[str, Any]]:
    """Return the grid and, by name, what the forward and the backward kernel are both called with."""
    batch, dim, seqlen = inputs.u.shape
    d_state = inputs.A.shape[1]
    is_complex = inputs.A.is_complex()
    groups = inputs.groups()
    block_c = 32 * config["num_warps"] // config["LANES"]
    group_blocks = triton.cdiv(dim // groups, block_c)
    arguments: dict[str, Any] = {
        "dim": dim, "seqlen": seqlen, "d_state": d_state, "group_channels": dim // groups,
        "group_blocks": group_blocks, "blocks": groups * group_blocks,
        "starts": triton.cdiv(seqlen, START_EVERY), "START_EVERY": START_EVERY,
        "RULE": inputs.discretization, "COMPLEX": is_complex, "SOFTPLUS": inputs.delta_softplus,
        "VARYING_B": inputs.B.dim() == 4, "VARYING_C": inputs.C.dim() == 4,
        "BLOCK_C": block_c, "ROWS": triton.next_power_of_2(d_state) // config["LANES"], **config,
    }  # fmt: skip
    for name, letter in (("u", "u"), ("delta", "d"), ("deltaA", "a"), ("z", "z")):
        tensor = getattr(inputs, name)
        arguments[f"{name}_ptr"] = tensor
        for axis, stride in zip("bct", (0, 0, 0) if tensor is None else tensor.stride(), strict=True):
            arguments[f"stride_{letter}{axis}"] = stride
    for name in ("B", "C"):
        tensor = getattr(inputs, name)
        arguments[f"{name}_ptr"] = tensor if tensor.dim() == 4 else constant(inputs, tensor)
        for axis, stride in zip("bgnt", tensor.stride() if tensor.dim() == 4 else (0,) * 4, strict=True):
            arguments[f"stride_{name}{axis}"] = stride
    for name in ("A", "D", "delta_bias"):
        arguments[f"{name}_ptr"] = constant(inputs, getattr(inputs, name))
    return (batch * groups * group_blocks,), arguments


def constant(inputs: ScanInputs, tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A tensor that every token reads, contiguous and float32; a complex one as pairs."""
    if tensor is None:
        return None
    tensor = tensor.to(inputs.wide(tensor.dtype)).contiguous()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def scan_forward(
    inputs: ScanInputs, save_starts: bool, config: dict[str, int] | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return (out, last_state, starts); starts is (batch, ceil(seqlen / START_EVERY), dim, d_state)."""
    batch, dim, _ = inputs.u.shape
    d_state = inputs.A.shape[1]
    config = config or config_for(batch, dim, d_state, inputs.A.is_complex())
    grid, arguments = kernel_arguments(inputs, config)
    states = {"device": inputs.u.device, "dtype": inputs.wide(inputs.A.dtype)}
    out = torch.empty_like(inputs.u)
    last_state = torch.empty(batch, dim, d_state, **states)
    starts = torch.empty(batch, arguments["starts"], dim, d_state, **states) if save_starts else None
    with torch.cuda.device_of(inputs.u):
        _scan_kernel[grid](
            initial_ptr=constant(inputs, inputs.initial_state),
            out_ptr=out,
            last_ptr=constant(inputs, last_state),
            starts_ptr=constant(inputs, starts),
            stride_ob=out.stride(0), stride_oc=out.stride(1), stride_ot=out.stride(2),
            **arguments,
        )  # fmt: skip
    return out, last_state, starts
