"""What the kernels of the selective scan do with a tile of tokens.

Every tile with states has the shape (tokens, ROWS, channels, LANES), and the shape is the layout: Triton
gives the last axes to the lanes and then the warps of a program, and the first to registers. With
ROWS * LANES >= d_state and channels = 32 * num_warps / LANES, a thread holds ROWS states of one channel at
all the tile's tokens. So taking one token out of a tile (`token_of`), which the loops over the tokens do,
is free, and the sum over the states is mostly additions within a thread.

Tiles are float32 from their load on. Triton moves a change of layout to the narrower side of a conversion:
converted where it is used, a bfloat16 delta would have its softplus computed by every lane that needs it.

Complex numbers are pairs, as `discretization_triton` says.
"""

import triton
import triton.language as tl

from mamba_kernels.discretization_triton import (
    cmul,
    cmul_conj,
    decay_of,
    gain_of,
    load_pair,
    real_of_conj_product,
)
from mamba_kernels.triton_math import softplus


@triton.jit
def load_constant(ptrs, state_in, COMPLEX: tl.constexpr):
    """Load what has no time axis, a pair (ROWS, channels, LANES), as a tile of one token."""
    re, im = load_pair(ptrs, 1, state_in, COMPLEX)
    return re[None], im[None]


@triton.jit
def load_tokens(ptrs, stride_t, first, seqlen, t, c_in):
    """Load a tile (tokens, channels) at tokens first + t, 0 outside the sequence; ptrs are those of t."""
    tile_in = ((first + t >= 0) & (first + t < seqlen))[:, None] & c_in[None, :]
    return tl.load(ptrs + tl.cast(first, tl.int64) * stride_t, mask=tile_in, other=0.0).to(tl.float32)


@triton.jit
def load_states(ptrs, stride_t, first, seqlen, t, n_in, COMPLEX: tl.constexpr):
    """Load a tile (tokens, ROWS, LANES) of B or C, a pair, in the same way."""
    PARTS: tl.constexpr = 2 if COMPLEX else 1
    tile_in = ((first + t >= 0) & (first + t < seqlen))[:, None, None] & n_in[None]
    return load_pair(ptrs + tl.cast(first, tl.int64) * (PARTS * stride_t), stride_t, tile_in, COMPLEX)


@triton.jit
def load_moving(
    u_ptrs, delta_ptrs, deltaA_ptrs, B_ptrs, first, seqlen, t, c_in, n_in,
    stride_ut, stride_dt, stride_at, stride_Bt, COMPLEX: tl.constexpr,
):  # fmt: skip
    """Load what moves the state: tiles of u, delta, deltaA and B. A copy stands for what is absent (None)."""
    u = load_tokens(u_ptrs, stride_ut, first, seqlen, t, c_in)
    delta = load_tokens(delta_ptrs, stride_dt, first, seqlen, t, c_in)
    deltaA = delta
    if deltaA_ptrs is not None:
        deltaA = load_tokens(deltaA_ptrs, stride_at, first, seqlen, t, c_in)
    B_re = u
    B_im = u
    if B_ptrs is not None:
        B_re, B_im = load_states(B_ptrs, stride_Bt, first, seqlen, t, n_in, COMPLEX)
    return u, delta, deltaA, B_re, B_im


@triton.jit
def load_reading(
    u, z_ptrs, C_ptrs, first, seqlen, t, c_in, n_in, stride_zt, stride_Ct, COMPLEX: tl.constexpr
):  # fmt: skip
    """Load what reads the state: tiles of z and C, in the same way."""
    z = u
    if z_ptrs is not None:
        z = load_tokens(z_ptrs, stride_zt, first, seqlen, t, c_in)
    C_re = u
    C_im = u
    if C_ptrs is not None:
        C_re, C_im = load_states(C_ptrs, stride_Ct, first, seqlen, t, n_in, COMPLEX)
    return z, C_re, C_im


@triton.jit
def token_of(tile, tokens, t: tl.constexpr):
    """tile[t], for a tile whose tokens lie in registers: no instruction, as x + -0.0 is x to the compiler.

    A sum of floats, which Triton does not compute a second time in another layout; to spare `over_channels`
    its pass through shared memory, it would do that with all the steps of a tile.
    """
    minus_zero = tl.full(tile.shape, -(2**31), tl.int32).to(tl.float32, bitcast=True)  # -0.0 would be 0.0
    return tl.sum(tl.where(tokens == t, tile, minus_zero), axis=0)


@triton.jit
def as_token(state, tokens):
    """state (ROWS, channels, LANES), laid out as one token of a tile.

    A loaded state would keep the layout of its load, and with it the loop over the tokens would.
    """
    return token_of(tl.where(tokens == 0, state[None], 0.0), tokens, 0)


@triton.jit
def over_states(x):
    """Sum a tile (tokens, ROWS, channels, LANES) over the states: (tokens, channels).

    From 4 lanes on, the lanes' sums pass through shared memory once and are added in registers, as in
    `over_channels`: that is fewer instructions than log2(LANES) shuffles for each token and channel.
    """
    by_lane = tl.sum(x, axis=1)
    if by_lane.shape[2] < 4:
        return tl.sum(by_lane, axis=2)
    else:
        return tl.sum(tl.permute(by_lane, (2, 0, 1)) * 1.0, axis=0)


@triton.jit
def over_channels(x):
    """Sum a tile (tokens, ROWS, channels, LANES) over the channels: (tokens, ROWS, LANES).

    With the channels as the first axis they lie in registers, after one pass through shared memory; in
    their place the sum would be log2(channels) shuffles for each of the results. The product by 1 is there
    to be computed in the layout of the new shape: a permutation alone keeps the old one.
    """
    return tl.sum(tl.permute(x, (2, 0, 1, 3)) * 1.0, axis=0)


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
def moves_of(
    u, delta, deltaA, delta_bias, A_re, A_im, B_re, B_im, t_in,
    RULE: tl.constexpr, COMPLEX: tl.constexpr, SOFTPLUS: tl.constexpr, ASYNC: tl.constexpr,
):  # fmt: skip
    """Go from what was loaded to the recurrence. ASYNC: deltaA is given; delta_bias may be None.

    Returns delta before and after its softplus, the step that the state decays over, all (tokens,
    channels), and decay and drive, pairs (tokens, ROWS, channels, LANES).
    """
    if delta_bias is not None:
        delta += delta_bias
    raw_delta = delta
    if SOFTPLUS:
        delta = softplus(delta)
    # A token past the end must leave the state alone: no step, no input.
    delta = tl.where(t_in, delta, 0.0)
    decay_delta = delta
    if ASYNC:
        decay_delta = deltaA
    decay_re, decay_im = decay_of(decay_delta[:, None, :, None], A_re, A_im, RULE, COMPLEX)
    drive_re, drive_im = drive_of(
        u[:, None, :, None], delta[:, None, :, None], A_re, A_im, B_re, B_im, RULE, COMPLEX
    )
    return raw_delta, delta, decay_delta, decay_re, decay_im, drive_re, drive_im


@triton.jit
def drive_gradients(
    g_re, g_im, u, delta, A_re, A_im, B_re, B_im, RULE: tl.constexpr, COMPLEX: tl.constexpr
):  # fmt: skip
    """Go from the gradient of gain * B * u to those of its factors; u, delta (tokens, channels).

    Returns those of u and delta, of A (ROWS, channels, LANES) and of B (tokens, ROWS, channels, LANES).
    """
    u4 = u[:, None, :, None]
    step = delta[:, None, :, None]
    if (RULE == "mamba") or (RULE == "dirac"):
        pulled = over_states(real_of_conj_product(g_re, g_im, B_re, B_im, COMPLEX))
        if RULE == "mamba":
            du = delta * pulled
            ddelta = u * pulled
            weight = step * u4
        else:
            du = pulled
            ddelta = tl.zeros_like(u)
            weight = u4
        dA_re = tl.zeros((g_re.shape[1], g_re.shape[2], g_re.shape[3]), tl.float32)
        dA_im = dA_re
        dB_re = g_re * weight
        dB_im = g_im * weight
    else:
        gain_re, gain_im, by_delta_re, by_delta_im, by_A_re, by_A_im = gain_of(
            step, A_re, A_im, RULE, COMPLEX
        )
        pulled_re, pulled_im = cmul_conj(g_re, g_im, B_re, B_im, COMPLEX)
        du = over_states(real_of_conj_product(pulled_re, pulled_im, gain_re, gain_im, COMPLEX))
        ddelta = u * over_states(
            real_of_conj_product(pulled_re, pulled_im, by_delta_re, by_delta_im, COMPLEX)
        )
        dA_re, dA_im = cmul_conj(pulled_re, pulled_im, by_A_re, by_A_im, COMPLEX)
        dA_re = tl.sum(dA_re * u4, axis=0)
        dA_im = tl.sum(dA_im * u4, axis=0)
        dB_re, dB_im = cmul_conj(g_re, g_im, gain_re, gain_im, COMPLEX)
        dB_re *= u4
        dB_im *= u4
    return du, ddelta, dA_re, dA_im, dB_re, dB_im


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
def retreat(
    g_re, g_im, decay_re, decay_im, direct_re, direct_im, tokens,
    BLOCK_T: tl.constexpr, COMPLEX: tl.constexpr,
):  # fmt: skip
    """Step the gradient of the state backward through a tile.

    g (ROWS, channels, LANES): what reaches the last token's state from later tokens; direct: what reaches
    each token's state from its own output. Returns the gradients of the tile's states, and the new g.
    """
    all_re = direct_re
    all_im = direct_im
    for t in tl.static_range(BLOCK_T - 1, -1, -1):
        here = tokens == t
        g_re += token_of(direct_re, tokens, t)
        all_re = tl.where(here, g_re[None], all_re)
        a_re = token_of(decay_re, tokens, t)
        if COMPLEX:
            g_im += token_of(direct_im, tokens, t)
            all_im = tl.where(here, g_im[None], all_im)
            a_im = token_of(decay_im, tokens, t)
            g_re, g_im = cmul_conj(g_re, g_im, a_re, a_im, COMPLEX)
        else:
            g_re *= a_re
    return all_re, all_im, g_re, g_im
