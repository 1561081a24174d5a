"""Triton kernel of the selective scan, forward.

A program walks one block of channels through the whole sequence, a tile of BLOCK_T tokens at a time, with
the state in registers and the next tile's inputs on their way. It multiplies and adds token after token,
as the equation reads: there is none of a parallel scan's extra work. How the tiles lie in registers is
said in `selective_scan_tiles_triton`.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from mamba_kernels.backend import interpreting
from mamba_kernels.discretization_triton import load_pair, real_of_product, store_pair
from mamba_kernels.selective_scan import ScanInputs
from mamba_kernels.selective_scan_tiles_triton import (
    advance,
    as_token,
    load_constant,
    load_moving,
    load_reading,
    moves_of,
    over_states,
)
from mamba_kernels.triton_math import logistic_quotient

# Tokens from one saved state to the next. A multiple of every BLOCK_T.
START_EVERY = 256


@triton.jit(do_not_specialize=["dim", "group_blocks", "blocks", "starts"])
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
    START_EVERY: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Program pid = (batch * groups + group) * group_blocks + block: BLOCK_C channels of one group.

    t: (BLOCK_T,) tokens of a tile, c: (BLOCK_C,) channels, n: (ROWS, LANES) states.
    """
    pid = tl.program_id(0)
    batch = (pid // blocks).to(tl.int64)
    group = (pid % blocks // group_blocks).to(tl.int64)
    c_in_group = pid % group_blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    c_in = c_in_group < group_channels
    c = group * group_channels + c_in_group
    n = tl.arange(0, ROWS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    n_in = n < d_state
    t = tl.arange(0, BLOCK_T)
    tokens = t[:, None, None, None]
    PARTS: tl.constexpr = 2 if COMPLEX else 1
    ASYNC: tl.constexpr = deltaA_ptr is not None

    state_in = n_in[:, None, :] & c_in[None, :, None]
    state = PARTS * (c[None, :, None] * d_state + n[:, None, :])
    state_size = tl.cast(dim, tl.int64) * d_state * PARTS
    A_re, A_im = load_constant(A_ptr + state, state_in, COMPLEX)
    delta_bias = None
    if delta_bias_ptr is not None:
        delta_bias = tl.load(delta_bias_ptr + c, mask=c_in, other=0.0).to(tl.float32)[None, :]
    if D_ptr is not None:
        D = tl.load(D_ptr + c, mask=c_in, other=0.0).to(tl.float32)[None, :]
    h_re = tl.zeros((ROWS, BLOCK_C, LANES), tl.float32)
    h_im = tl.zeros((ROWS, BLOCK_C, LANES), tl.float32)  # not h_re: see _scan_backward_kernel
    if initial_ptr is not None:
        h_re, h_im = load_pair(initial_ptr + batch * state_size + state, 1, state_in, COMPLEX)
        h_re = as_token(h_re, tokens)
        h_im = as_token(h_im, tokens)

    t64 = t.to(tl.int64)[:, None]
    u_ptrs = u_ptr + batch * stride_ub + c[None, :] * stride_uc + t64 * stride_ut
    delta_ptrs = delta_ptr + batch * stride_db + c[None, :] * stride_dc + t64 * stride_dt
    out_ptrs = out_ptr + batch * stride_ob + c[None, :] * stride_oc + t64 * stride_ot
    deltaA_ptrs = None
    z_ptrs = None
    B_ptrs = None
    C_ptrs = None
    if deltaA_ptr is not None:
        deltaA_ptrs = deltaA_ptr + batch * stride_ab + c[None, :] * stride_ac + t64 * stride_at
    if z_ptr is not None:
        z_ptrs = z_ptr + batch * stride_zb + c[None, :] * stride_zc + t64 * stride_zt
    if VARYING_B:
        B_ptrs = B_ptr + batch * stride_Bb + group * stride_Bg + n.to(tl.int64)[None] * stride_Bn
        B_ptrs += t64[:, :, None] * (PARTS * stride_Bt)
    else:
        B_re, B_im = load_constant(B_ptr + state, state_in, COMPLEX)
    if VARYING_C:
        C_ptrs = C_ptr + batch * stride_Cb + group * stride_Cg + n.to(tl.int64)[None] * stride_Cn
        C_ptrs += t64[:, :, None] * (PARTS * stride_Ct)
    else:
        C_re, C_im = load_constant(C_ptr + state, state_in, COMPLEX)

    u_next, delta_next, deltaA_next, B_next_re, B_next_im = load_moving(
        u_ptrs, delta_ptrs, deltaA_ptrs, B_ptrs, 0, seqlen, t, c_in, n_in,
        stride_ut, stride_dt, stride_at, stride_Bt, COMPLEX,
    )  # fmt: skip
    z_next, C_next_re, C_next_im = load_reading(
        u_next, z_ptrs, C_ptrs, 0, seqlen, t, c_in, n_in, stride_zt, stride_Ct, COMPLEX
    )
    for first in range(0, seqlen, BLOCK_T):
        if starts_ptr is not None:
            if first % START_EVERY == 0:
                saved = (batch * starts + first // START_EVERY) * state_size
                store_pair(starts_ptr + saved + state, 1, h_re, h_im, state_in, COMPLEX)
        u = u_next
        delta = delta_next
        deltaA = deltaA_next
        z = z_next
        if VARYING_B:
            B_re = B_next_re[:, :, None, :]
            B_im = B_next_im[:, :, None, :]
        if VARYING_C:
            C_re = C_next_re[:, :, None, :]
            C_im = C_next_im[:, :, None, :]
        u_next, delta_next, deltaA_next, B_next_re, B_next_im = load_moving(
            u_ptrs, delta_ptrs, deltaA_ptrs, B_ptrs, first + BLOCK_T, seqlen, t, c_in, n_in,
            stride_ut, stride_dt, stride_at, stride_Bt, COMPLEX,
        )  # fmt: skip
        z_next, C_next_re, C_next_im = load_reading(
            u_next, z_ptrs, C_ptrs, first + BLOCK_T, seqlen, t, c_in, n_in, stride_zt, stride_Ct, COMPLEX
        )

        t_in = (first + t < seqlen)[:, None]
        _, _, _, decay_re, decay_im, drive_re, drive_im = moves_of(
            u, delta, deltaA, delta_bias, A_re, A_im, B_re, B_im, t_in, RULE, COMPLEX, SOFTPLUS, ASYNC
        )
        h_all_re, h_all_im, _, _, h_re, h_im = advance(
            h_re, h_im, decay_re, decay_im, drive_re, drive_im, tokens, BLOCK_T, COMPLEX
        )
        y = over_states(real_of_product(C_re, C_im, h_all_re, h_all_im, COMPLEX))
        if COMPLEX:
            y *= 2.0
        if D_ptr is not None:
            y += D * u
        if z_ptr is not None:
            y *= logistic_quotient(z, z, INTERPRET)
        at = tl.cast(first, tl.int64) * stride_ot
        tl.store(out_ptrs + at, y.to(out_ptr.dtype.element_ty), mask=t_in & c_in[None, :])

    store_pair(last_ptr + batch * state_size + state, 1, h_re, h_im, state_in, COMPLEX)


def config_for(inputs: ScanInputs) -> dict[str, int]:
    """Block sizes: BLOCK_T tokens a tile, and LANES lanes of a warp that share a channel's states.

    A thread holds 4 states (2 complex ones) of its channel, at 16 tokens, where d_state allows. A warp
    walks a whole sequence, so few channels need more, lighter warps: 2 states a thread. A large d_state
    needs short tiles, as B and C take registers too. The rest holds for Mamba's own rule and d_state, as
    measured on an H200: few channels do best with long tiles, many with 8 states a thread, or short tiles
    where the channels lie last (there 8 states spill).
    """
    states = triton.next_power_of_2(inputs.A.shape[1])
    is_complex = inputs.A.is_complex()
    usual = states == 16 and not is_complex and inputs.discretization == "mamba"
    channels = inputs.u.shape[0] * inputs.u.shape[1]
    held, tokens = 4, 16
    if channels < 4096:
        held, tokens = (2, 32) if usual else (2, 16)
    elif channels >= 8192 and usual:
        held, tokens = (4, 8) if channels_last(inputs.u) else (8, 16)
    if is_complex:
        held //= 2
    lanes = min(32, max(1, states // held))
    block_t = min(tokens, tokens * held * lanes // states, max(1, 1024 // states))
    return {"BLOCK_T": max(1, block_t), "LANES": lanes, "num_warps": 1}


def channels_last(u: torch.Tensor) -> bool:
    return u.stride(1) < u.stride(2)


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
        "starts": triton.cdiv(seqlen, START_EVERY), "START_EVERY": START_EVERY, "INTERPRET": interpreting(),
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
    """A tensor without a time axis, for a kernel: contiguous and float32."""
    return None if tensor is None else as_reals(tensor.to(inputs.wide(tensor.dtype)).contiguous())


def as_reals(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A complex tensor as pairs, for a kernel; another one as it is."""
    if tensor is None or not tensor.is_complex():
        return tensor
    return torch.view_as_real(tensor.resolve_conj())


def scan_forward(
    inputs: ScanInputs, save_starts: bool, config: dict[str, int] | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return (out, last_state, starts); starts is (batch, ceil(seqlen / START_EVERY), dim, d_state)."""
    batch = inputs.u.shape[0]
    grid, arguments = kernel_arguments(inputs, config or config_for(inputs))
    states = {"device": inputs.u.device, "dtype": inputs.wide(inputs.A.dtype)}
    out = torch.empty_like(inputs.u)
    last_state = torch.empty(batch, *inputs.A.shape, **states)
    starts = torch.empty(batch, arguments["starts"], *inputs.A.shape, **states) if save_starts else None
    with torch.cuda.device_of(inputs.u):
        _scan_kernel[grid](
            initial_ptr=constant(inputs, inputs.initial_state),
            out_ptr=out,
            last_ptr=as_reals(last_state),
            starts_ptr=as_reals(starts),
            stride_ob=out.stride(0), stride_oc=out.stride(1), stride_ot=out.stride(2),
            **arguments,
        )  # fmt: skip
    return out, last_state, starts
