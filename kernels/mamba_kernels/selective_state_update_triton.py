"""Triton kernel of `selective_state_update`: one program a tile of rows of one head's state.

The state is read and written once, which is nearly all the traffic; the rest is small and comes from
cache. Many small programs (a tile of 2048 elements a warp) keep more bytes in flight than few large ones.
"""

import torch
import triton
import triton.language as tl

from mamba_kernels.triton_math import expm1_ratio, silu, softplus


@triton.jit
def _load_or_zero(ptr, offsets, mask):
    return tl.load(ptr + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _selective_state_update_kernel(
    state_ptr, x_ptr, dt_ptr, dt_bias_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, deltaA_ptr, out_ptr, slots_ptr,
    nheads, dim, d_state, heads_per_group, tiles,
    stride_state_slot, stride_state_head, stride_state_dim, stride_state_n,
    stride_x_batch, stride_x_head, stride_x_dim,
    stride_dt_batch, stride_dt_head, stride_dt_dim,
    stride_bias_head, stride_bias_dim,
    stride_A_head, stride_A_dim, stride_A_n,
    stride_B_batch, stride_B_group, stride_B_n,
    stride_C_batch, stride_C_group, stride_C_n,
    stride_D_head, stride_D_dim,
    stride_z_batch, stride_z_head, stride_z_dim,
    stride_deltaA_batch, stride_deltaA_head, stride_deltaA_dim,
    stride_out_batch, stride_out_head, stride_out_dim,
    SOFTPLUS: tl.constexpr, DISCRETIZATION: tl.constexpr, TIED: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program pid = (batch * nheads + head) * tiles + tile updates state[slot, head, p, :].

    p: BLOCK_P rows of dim, n: BLOCK_N >= d_state columns. TIED: A, dt, dt_bias and deltaA do not vary
    over p and n, so the decay is one number a program.
    """
    pid = tl.program_id(0)
    tile = pid % tiles
    head = (pid // tiles % nheads).to(tl.int64)
    batch = (pid // (tiles * nheads)).to(tl.int64)
    group = head // heads_per_group
    p = tile * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    p_in = p < dim
    n_in = n < d_state
    both_in = p_in[:, None] & n_in[None, :]
    p64 = p.to(tl.int64)

    out_ptrs = out_ptr + batch * stride_out_batch + head * stride_out_head + p64 * stride_out_dim
    slot = batch
    if slots_ptr is not None:
        slot = tl.load(slots_ptr + batch).to(tl.int64)
        if slot < 0:  # a padding row: no state of its own
            tl.store(out_ptrs, tl.zeros((BLOCK_P,), out_ptr.dtype.element_ty), mask=p_in)
            return

    state_ptr += slot * stride_state_slot + head * stride_state_head
    state_ptrs = state_ptr + p64[:, None] * stride_state_dim + n[None, :] * stride_state_n
    state = tl.load(state_ptrs, mask=both_in, other=0.0).to(tl.float32)

    x = _load_or_zero(x_ptr + batch * stride_x_batch + head * stride_x_head, p64 * stride_x_dim, p_in)
    B = _load_or_zero(B_ptr + batch * stride_B_batch + group * stride_B_group, n * stride_B_n, n_in)[None, :]
    C = _load_or_zero(C_ptr + batch * stride_C_batch + group * stride_C_group, n * stride_C_n, n_in)[None, :]
    y = tl.zeros((BLOCK_P,), tl.float32)
    if D_ptr is not None:
        y += x * _load_or_zero(D_ptr + head * stride_D_head, p64 * stride_D_dim, p_in)
    if z_ptr is not None:
        z_ptr += batch * stride_z_batch + head * stride_z_head
        gate = silu(_load_or_zero(z_ptr, p64 * stride_z_dim, p_in))

    dt_ptr += batch * stride_dt_batch + head * stride_dt_head
    A_ptr += head * stride_A_head
    if TIED:
        dt = tl.load(dt_ptr).to(tl.float32)
        A = tl.load(A_ptr).to(tl.float32)
    else:
        dt = _load_or_zero(dt_ptr, p64 * stride_dt_dim, p_in)
        A = _load_or_zero(A_ptr, p64[:, None] * stride_A_dim + n[None, :] * stride_A_n, both_in)
    if dt_bias_ptr is not None:
        dt_bias_ptr += head * stride_bias_head
        if TIED:
            dt += tl.load(dt_bias_ptr).to(tl.float32)
        else:
            dt += _load_or_zero(dt_bias_ptr, p64 * stride_bias_dim, p_in)
    if SOFTPLUS:
        dt = softplus(dt)

    decay_dt = dt
    if deltaA_ptr is not None:
        deltaA_ptr += batch * stride_deltaA_batch + head * stride_deltaA_head
        if TIED:
            decay_dt = tl.load(deltaA_ptr).to(tl.float32)
        else:
            decay_dt = _load_or_zero(deltaA_ptr, p64 * stride_deltaA_dim, p_in)
    if not TIED:
        dt = dt[:, None]
        decay_dt = decay_dt[:, None]

    if DISCRETIZATION == "bilinear":
        decay = (1.0 + decay_dt * A / 2) / (1.0 - decay_dt * A / 2)
        gain = dt / (1.0 - dt * A / 2)
    else:
        decay = tl.exp(decay_dt * A)
        if DISCRETIZATION == "zoh":
            gain = dt * expm1_ratio(dt * A)
        elif DISCRETIZATION == "dirac":
            gain = 1.0
        else:
            gain = dt

    state = state * decay + (B * gain) * x[:, None]
    tl.store(state_ptrs, state.to(state_ptr.dtype.element_ty), mask=both_in)

    y += tl.sum(state * C, axis=1)
    if z_ptr is not None:
        y *= gate
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=p_in)


def config_for(dim: int, d_state: int) -> dict[str, int]:
    """Block sizes: 2048 state elements a warp, at least 4 rows and never more rows than there are."""
    block_n = triton.next_power_of_2(d_state)
    rows = max(4, 2048 // block_n)
    return {"BLOCK_P": min(rows, triton.next_power_of_2(dim)), "num_warps": 1}


def launch(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    dt_softplus: bool,
    slots: torch.Tensor | None,
    deltaA: torch.Tensor | None,
    discretization: str,
    config: dict[str, int] | None = None,
) -> torch.Tensor:
    """Run the kernel on tensors with a head axis; see `selective_state_update` for the shapes."""
    batch, nheads, dim = x.shape
    d_state = state.shape[-1]
    config = config or config_for(dim, d_state)
    tied = A.stride(-1) == 0 and all(
        t is None or t.stride(-1) == 0 for t in (A.transpose(-1, -2), dt, dt_bias, deltaA)
    )
    out = torch.empty_like(x)
    tiles = triton.cdiv(dim, config["BLOCK_P"])

    def strides(tensor: torch.Tensor | None, rank: int) -> tuple[int, ...]:
        return (0,) * rank if tensor is None else tensor.stride()

    with torch.cuda.device_of(x):
        _selective_state_update_kernel[(batch * nheads * tiles,)](
            state, x, dt, dt_bias, A, B, C, D, z, deltaA, out, slots,
            nheads, dim, d_state, nheads // B.shape[1], tiles,
            *state.stride(), *x.stride(), *dt.stride(), *strides(dt_bias, 2), *A.stride(),
            *B.stride(), *C.stride(), *strides(D, 2), *strides(z, 3), *strides(deltaA, 3), *out.stride(),
            SOFTPLUS=dt_softplus, DISCRETIZATION=discretization, TIED=tied,
            BLOCK_N=triton.next_power_of_2(d_state), **config,
        )  # fmt: skip
    return out
