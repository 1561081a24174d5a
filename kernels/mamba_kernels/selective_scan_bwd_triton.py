"""Triton kernel of the selective scan, backward.

A program goes through one block of channels from the end of the sequence to its start, a stretch of
START_EVERY tokens at a time: forward through the stretch from the state that the forward pass saved, to
find the state before each tile; then backward over the tiles, computing each tile's states again. Only
the start states of one stretch's tiles are held, in registers. Tiles are shaped and laid out as forward.

With g[t] the gradient of h[t],

    g[t] = conj(C[t]) * dy[t] + conj(decay[t+1]) * g[t+1]          (twice the first term where complex)

and every other gradient is a product of g[t] with what token t read, summed over states, tokens or
channels. The sums over channels, dB and dC, stay within a program; torch adds the programs' parts in a
fixed order. Nothing is added atomically, so the gradients are the same in every run.
"""

import torch
import triton
import triton.language as tl

from mamba_kernels.discretization_triton import (
    cmul_conj,
    decay_slope_of,
    load_pair,
    real_of_conj_product,
    real_of_product,
    store_pair,
)
from mamba_kernels.selective_scan import ScanInputs
from mamba_kernels.selective_scan_tiles_triton import (
    advance,
    as_token,
    drive_gradients,
    load_constant,
    load_moving,
    load_reading,
    load_tokens,
    moves_of,
    over_channels,
    over_states,
    retreat,
)
from mamba_kernels.selective_scan_triton import as_reals, channels_last, constant, kernel_arguments
from mamba_kernels.triton_math import sigmoid


@triton.jit(do_not_specialize=["dim", "group_blocks", "blocks", "starts"])
def _scan_backward_kernel(
    u_ptr, delta_ptr, deltaA_ptr, z_ptr, A_ptr, B_ptr, C_ptr, D_ptr, delta_bias_ptr, starts_ptr,
    dout_ptr, dlast_ptr, du_ptr, ddelta_ptr, ddeltaA_ptr, dz_ptr, out_ptr,
    dA_ptr, dB_ptr, dC_ptr, dD_ptr, ddelta_bias_ptr, dinitial_state_ptr, slots_ptr,
    dim, seqlen, d_state, group_channels, group_blocks, blocks, starts,
    stride_ub, stride_uc, stride_ut, stride_db, stride_dc, stride_dt,
    stride_ab, stride_ac, stride_at, stride_zb, stride_zc, stride_zt,
    stride_gb, stride_gc, stride_gt, stride_ob, stride_oc, stride_ot,
    stride_Bb, stride_Bg, stride_Bn, stride_Bt, stride_Cb, stride_Cg, stride_Cn, stride_Ct,
    RULE: tl.constexpr, COMPLEX: tl.constexpr, SOFTPLUS: tl.constexpr,
    VARYING_B: tl.constexpr, VARYING_C: tl.constexpr,
    BLOCK_T: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr, LANES: tl.constexpr,
    START_EVERY: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Program pid = (batch * groups + group) * group_blocks + block, t, c and n: as forward.

    stride_g: of dout; stride_o: of du, ddelta, ddeltaA, dz and out alike. dA, and dB and dC that have no
    time axis, are (batch, dim, d_state); dD and ddelta_bias (batch, dim); dB and dC that have one are
    (programs, seqlen, d_state).
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
    TILES: tl.constexpr = START_EVERY // BLOCK_T
    SLOT: tl.constexpr = ROWS * BLOCK_C * LANES  # numbers of one tile's start state
    r = tl.arange(0, ROWS)[:, None, None]
    slot = (tl.arange(0, BLOCK_C)[None, :, None] * LANES + tl.arange(0, LANES)[None, None, :]) * ROWS + r
    slot_in = slot < SLOT
    slot_ptrs = slots_ptr + pid.to(tl.int64) * (TILES * SLOT * PARTS) + slot

    state_in = n_in[:, None, :] & c_in[None, :, None]
    state = PARTS * (c[None, :, None] * d_state + n[:, None, :])
    state_size = tl.cast(dim, tl.int64) * d_state * PARTS
    A_re, A_im = load_constant(A_ptr + state, state_in, COMPLEX)
    delta_bias = None
    if delta_bias_ptr is not None:
        delta_bias = tl.load(delta_bias_ptr + c, mask=c_in, other=0.0).to(tl.float32)[None, :]
    if D_ptr is not None:
        D = tl.load(D_ptr + c, mask=c_in, other=0.0).to(tl.float32)[None, :]
    # Zeros for each sum: names that share their first value stay one value in a loop (Triton 3.6).
    g_re = tl.zeros((ROWS, BLOCK_C, LANES), tl.float32)
    g_im = tl.zeros((ROWS, BLOCK_C, LANES), tl.float32)
    if dlast_ptr is not None:
        g_re, g_im = load_pair(dlast_ptr + batch * state_size + state, 1, state_in, COMPLEX)
        g_re = as_token(g_re, tokens)
        g_im = as_token(g_im, tokens)

    t64 = t.to(tl.int64)[:, None]
    u_ptrs = u_ptr + batch * stride_ub + c[None, :] * stride_uc + t64 * stride_ut
    delta_ptrs = delta_ptr + batch * stride_db + c[None, :] * stride_dc + t64 * stride_dt
    dout_ptrs = dout_ptr + batch * stride_gb + c[None, :] * stride_gc + t64 * stride_gt
    grad = batch * stride_ob + c[None, :] * stride_oc + t64 * stride_ot
    part = (pid.to(tl.int64) * seqlen + t64[:, :, None]) * d_state * PARTS + n[None] * PARTS
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

    dA_re = tl.zeros((ROWS, BLOCK_C, LANES), tl.float32)
    dA_im = tl.zeros((ROWS, BLOCK_C, LANES), tl.float32)
    dB_re = tl.zeros((ROWS, BLOCK_C, LANES), tl.float32)
    dB_im = tl.zeros((ROWS, BLOCK_C, LANES), tl.float32)
    dC_re = tl.zeros((ROWS, BLOCK_C, LANES), tl.float32)
    dC_im = tl.zeros((ROWS, BLOCK_C, LANES), tl.float32)
    dD = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    ddelta_bias = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)

    # The tile that the next walk back begins with is always on its way.
    first = (tl.cdiv(seqlen, BLOCK_T) - 1) * BLOCK_T
    u_next, delta_next, deltaA_next, B_next_re, B_next_im = load_moving(
        u_ptrs, delta_ptrs, deltaA_ptrs, B_ptrs, first, seqlen, t, c_in, n_in,
        stride_ut, stride_dt, stride_at, stride_Bt, COMPLEX,
    )  # fmt: skip
    z_next, C_next_re, C_next_im = load_reading(
        u_next, z_ptrs, C_ptrs, first, seqlen, t, c_in, n_in, stride_zt, stride_Ct, COMPLEX
    )
    dout_next = load_tokens(dout_ptrs, stride_gt, first, seqlen, t, c_in)

    for back in range(starts):
        stretch = starts - 1 - back
        origin = stretch * START_EVERY
        tiles = tl.minimum(tl.cdiv(seqlen - origin, BLOCK_T), TILES)

        # Forward through the stretch, for the state before each tile.
        saved = (batch * starts + stretch) * state_size
        h_re, h_im = load_pair(starts_ptr + saved + state, 1, state_in, COMPLEX)
        h_re = as_token(h_re, tokens)
        h_im = as_token(h_im, tokens)
        u_ahead, delta_ahead, deltaA_ahead, B_ahead_re, B_ahead_im = load_moving(
            u_ptrs, delta_ptrs, deltaA_ptrs, B_ptrs, origin, seqlen, t, c_in, n_in,
            stride_ut, stride_dt, stride_at, stride_Bt, COMPLEX,
        )  # fmt: skip
        for i in range(tiles):
            store_pair(slot_ptrs + i * (SLOT * PARTS), SLOT, h_re, h_im, slot_in, COMPLEX)
            u = u_ahead
            delta = delta_ahead
            deltaA = deltaA_ahead
            if VARYING_B:
                B_re = B_ahead_re[:, :, None, :]
                B_im = B_ahead_im[:, :, None, :]
            u_ahead, delta_ahead, deltaA_ahead, B_ahead_re, B_ahead_im = load_moving(
                u_ptrs, delta_ptrs, deltaA_ptrs, B_ptrs, origin + (i + 1) * BLOCK_T, seqlen, t, c_in, n_in,
                stride_ut, stride_dt, stride_at, stride_Bt, COMPLEX,
            )  # fmt: skip
            t_in = (origin + i * BLOCK_T + t < seqlen)[:, None]
            _, _, _, decay_re, decay_im, drive_re, drive_im = moves_of(
                u, delta, deltaA, delta_bias, A_re, A_im, B_re, B_im, t_in, RULE, COMPLEX, SOFTPLUS, ASYNC
            )
            _, _, _, _, h_re, h_im = advance(
                h_re, h_im, decay_re, decay_im, drive_re, drive_im, tokens, BLOCK_T, COMPLEX
            )

        # What one thread of the program stored, another may load.
        tl.debug_barrier()

        # Backward over the stretch's tiles.
        h_next_re, h_next_im = load_pair(slot_ptrs + (tiles - 1) * (SLOT * PARTS), SLOT, slot_in, COMPLEX)
        for j in range(tiles):
            i = tiles - 1 - j
            first = origin + i * BLOCK_T
            t_in = (first + t < seqlen)[:, None]
            u = u_next
            delta = delta_next
            deltaA = deltaA_next
            z = z_next
            dout = dout_next
            if VARYING_B:
                B_re = B_next_re[:, :, None, :]
                B_im = B_next_im[:, :, None, :]
            if VARYING_C:
                C_re = C_next_re[:, :, None, :]
                C_im = C_next_im[:, :, None, :]
            u_next, delta_next, deltaA_next, B_next_re, B_next_im = load_moving(
                u_ptrs, delta_ptrs, deltaA_ptrs, B_ptrs, first - BLOCK_T, seqlen, t, c_in, n_in,
                stride_ut, stride_dt, stride_at, stride_Bt, COMPLEX,
            )  # fmt: skip
            z_next, C_next_re, C_next_im = load_reading(
                u_next, z_ptrs, C_ptrs, first - BLOCK_T, seqlen, t, c_in, n_in, stride_zt, stride_Ct, COMPLEX
            )
            dout_next = load_tokens(dout_ptrs, stride_gt, first - BLOCK_T, seqlen, t, c_in)
            h_re = as_token(h_next_re, tokens)
            h_im = as_token(h_next_im, tokens)
            before = tl.maximum(i - 1, 0) * (SLOT * PARTS)
            h_next_re, h_next_im = load_pair(slot_ptrs + before, SLOT, slot_in, COMPLEX)

            # The tile's states, as forward.
            raw_delta, delta, decay_delta, decay_re, decay_im, drive_re, drive_im = moves_of(
                u, delta, deltaA, delta_bias, A_re, A_im, B_re, B_im, t_in, RULE, COMPLEX, SOFTPLUS, ASYNC
            )
            after_re, after_im, before_re, before_im, _, _ = advance(
                h_re, h_im, decay_re, decay_im, drive_re, drive_im, tokens, BLOCK_T, COMPLEX
            )

            # From the output to y.
            at = tl.cast(first, tl.int64) * stride_ot
            tile_in = t_in & c_in[None, :]
            dy = dout
            if z_ptr is not None:
                gate = sigmoid(z, INTERPRET)
                dy = dout * (z * gate)
            if (z_ptr is not None) or (out_ptr is not None):
                y = over_states(real_of_product(C_re, C_im, after_re, after_im, COMPLEX))
                if COMPLEX:
                    y *= 2.0
                if D_ptr is not None:
                    y += D * u
                if out_ptr is not None:
                    out = y
                    if z_ptr is not None:
                        out = y * (z * gate)
                    tl.store(out_ptr + grad + at, out.to(out_ptr.dtype.element_ty), mask=tile_in)
                if z_ptr is not None:
                    dz = dout * y * (gate * (1.0 + z * (1.0 - gate)))
                    tl.store(dz_ptr + grad + at, dz.to(dz_ptr.dtype.element_ty), mask=tile_in)

            # From y to the states, C and D.
            dy4 = dy[:, None, :, None]
            if COMPLEX:
                dy4 *= 2.0
            all_g_re, all_g_im, g_re, g_im = retreat(
                g_re, g_im, decay_re, decay_im, C_re * dy4, -C_im * dy4, tokens, BLOCK_T, COMPLEX
            )
            tile_part_in = t_in[:, :, None] & n_in[None]
            part_at = part + tl.cast(first, tl.int64) * d_state * PARTS
            if VARYING_C:
                dC_tile_re = over_channels(after_re * dy4)
                dC_tile_im = over_channels(-after_im * dy4)
                store_pair(dC_ptr + part_at, 1, dC_tile_re, dC_tile_im, tile_part_in, COMPLEX)
            else:
                dC_re += tl.sum(after_re * dy4, axis=0)
                dC_im += tl.sum(-after_im * dy4, axis=0)
            du = tl.zeros_like(u)
            if D_ptr is not None:
                dD += dy * u
                du = dy * D

            # From the states to the decay ...
            slope_re, slope_im = decay_slope_of(decay_re, decay_im, RULE, COMPLEX)
            d_re, d_im = cmul_conj(all_g_re, all_g_im, slope_re, slope_im, COMPLEX)
            d_re, d_im = cmul_conj(d_re, d_im, before_re, before_im, COMPLEX)
            ddecay_step = over_states(real_of_conj_product(d_re, d_im, A_re, A_im, COMPLEX))
            dA_re += tl.sum(d_re * decay_delta[:, None, :, None], axis=0)
            dA_im += tl.sum(d_im * decay_delta[:, None, :, None], axis=0)

            # ... and to the drive.
            du_drive, ddelta, dA_drive_re, dA_drive_im, d_re, d_im = drive_gradients(
                all_g_re, all_g_im, u, delta, A_re, A_im, B_re, B_im, RULE, COMPLEX
            )
            du += du_drive
            dA_re += dA_drive_re
            dA_im += dA_drive_im
            if VARYING_B:
                dB_tile_re = over_channels(d_re)
                dB_tile_im = over_channels(d_im)
                store_pair(dB_ptr + part_at, 1, dB_tile_re, dB_tile_im, tile_part_in, COMPLEX)
            else:
                dB_re += tl.sum(d_re, axis=0)
                dB_im += tl.sum(d_im, axis=0)

            if deltaA_ptr is None:
                ddelta += ddecay_step
            else:
                ddecay_step = ddecay_step.to(ddeltaA_ptr.dtype.element_ty)
                tl.store(ddeltaA_ptr + grad + at, ddecay_step, mask=tile_in)
            if SOFTPLUS:
                ddelta *= sigmoid(raw_delta, INTERPRET)
            if delta_bias_ptr is not None:
                ddelta_bias += tl.where(t_in, ddelta, 0.0)
            tl.store(ddelta_ptr + grad + at, ddelta.to(ddelta_ptr.dtype.element_ty), mask=tile_in)
            tl.store(du_ptr + grad + at, du.to(du_ptr.dtype.element_ty), mask=tile_in)
        tl.debug_barrier()

    batch_state = batch * state_size + state
    store_pair(dA_ptr + batch_state, 1, dA_re, dA_im, state_in, COMPLEX)
    if not VARYING_B:
        store_pair(dB_ptr + batch_state, 1, dB_re, dB_im, state_in, COMPLEX)
    if not VARYING_C:
        store_pair(dC_ptr + batch_state, 1, dC_re, dC_im, state_in, COMPLEX)
    if dinitial_state_ptr is not None:
        store_pair(dinitial_state_ptr + batch_state, 1, g_re, g_im, state_in, COMPLEX)
    if D_ptr is not None:
        tl.store(dD_ptr + batch * dim + c, tl.sum(dD, axis=0), mask=c_in)
    if delta_bias_ptr is not None:
        tl.store(ddelta_bias_ptr + batch * dim + c, tl.sum(ddelta_bias, axis=0), mask=c_in)


def config_for(inputs: ScanInputs) -> dict[str, int]:
    """Block sizes, as forward; tiles are shorter, for there is more to hold of each token.

    Larger programs write fewer parts of dB and dC, but their warps wait for each other in every tile: one
    warp is best, except for many channels that lie last, and for few. Parts take 4 bytes a program, token
    and state, so those of one warp are 16 bytes a channel and token. Measured on an H200.
    """
    states = triton.next_power_of_2(inputs.A.shape[1])
    channels = inputs.u.shape[0] * inputs.u.shape[1]
    held, tokens, num_warps = 4, 8, 1
    if channels < 4096:
        held, num_warps = 2, 2
        if states == 16 and not inputs.A.is_complex():
            tokens = 16
    elif channels >= 8192 and channels_last(inputs.u):
        num_warps = 2
    if inputs.A.is_complex():
        held //= 2
    if inputs.discretization in ("zoh", "bilinear"):
        tokens //= 2
    lanes = min(32, max(1, states // held))
    block_t = max(1, min(tokens, tokens * held * lanes // states))
    return {"BLOCK_T": block_t, "LANES": lanes, "num_warps": num_warps}


def scan_backward(
    inputs: ScanInputs,
    starts: torch.Tensor,
    dout: torch.Tensor,
    dlast_state: torch.Tensor | None,
    save_out: bool,
    config: dict[str, int] | None = None,
) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
    """Return the gradients of the tensors given, by name, and out if save_out.

    starts: as the forward kernel saved them. dlast_state: (batch, dim, d_state), or None for zero.
    """
    u = inputs.u
    batch, dim, seqlen = u.shape
    d_state = inputs.A.shape[1]
    is_complex = inputs.A.is_complex()
    grid, arguments = kernel_arguments(inputs, config or config_for(inputs))

    def part(name: str) -> torch.Tensor | None:
        """What the programs write of one gradient: all of it, or, of a parameter's, each its own part."""
        tensor = getattr(inputs, name)
        if tensor is None:
            return None
        if name in ("u", "delta", "deltaA", "z"):
            return torch.empty_like(u, dtype=tensor.dtype)  # of u's layout, all four
        if tensor.dim() == 1:
            return torch.empty(batch, dim, device=u.device)
        shape = (grid[0], seqlen, d_state) if tensor.dim() == 4 else (batch, dim, d_state)
        return torch.empty(shape, device=u.device, dtype=inputs.wide(inputs.A.dtype))

    parts = {name: part(name) for name in ScanInputs._fields[:10]}
    out = torch.empty_like(u) if save_out else None
    tiles = arguments["START_EVERY"] // arguments["BLOCK_T"]
    numbers = arguments["ROWS"] * arguments["BLOCK_C"] * arguments["LANES"] * (2 if is_complex else 1)
    slots = torch.empty(grid[0], tiles, numbers, device=u.device)
    with torch.cuda.device_of(u):
        _scan_backward_kernel[grid](
            starts_ptr=as_reals(starts),
            dout_ptr=dout,
            dlast_ptr=constant(inputs, dlast_state),
            out_ptr=out,
            slots_ptr=slots,
            stride_gb=dout.stride(0), stride_gc=dout.stride(1), stride_gt=dout.stride(2),
            stride_ob=parts["u"].stride(0), stride_oc=parts["u"].stride(1), stride_ot=parts["u"].stride(2),
            **{f"d{name}_ptr": as_reals(tensor) for name, tensor in parts.items()},
            **arguments,
        )  # fmt: skip

    grads = {name: tensor for name, tensor in parts.items() if tensor is not None}
    for name in grads.keys() & {"A", "B", "C", "D", "delta_bias"}:
        if getattr(inputs, name).dim() < 4:
            grads[name] = grads[name].sum(0)
            continue
        by_block = grads[name].view(batch, inputs.groups(), -1, seqlen, d_state)
        grad = by_block.sum(2).transpose(-1, -2)  # (batch, groups, d_state, seqlen)
        grads[name] = torch.view_as_real(grad).flatten(-2) if is_complex else grad
    return grads, out
