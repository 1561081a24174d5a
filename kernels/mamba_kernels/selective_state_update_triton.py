"""Triton kernel of `selective_state_update`: one program a tile of rows of one head's state.

The state is read and written once, which is nearly all the traffic; the rest is small and comes from
cache. Many small programs (a tile of 2048 elements a warp) keep more bytes in flight than few large ones.
"""

import torch
import triton
import triton.language as tl

from mamba_kernels.decode_norm_triton import inside, unpack
from mamba_kernels.triton_math import expm1_ratio, silu, softplus


@triton.jit
def _load_or_zero(ptr, offsets, mask):
    return tl.load(ptr + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _load_tile(
    state_ptr, x_ptr, D_ptr, z_ptr, first, n,
    STATE_DIM: tl.constexpr, STATE_N: tl.constexpr, X_DIM: tl.constexpr, D_DIM: tl.constexpr,
    Z_DIM: tl.constexpr, INDEX: tl.constexpr, DIM: tl.constexpr, D_STATE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, PACKED: tl.constexpr,
    LOAD: tl.constexpr,
):  # fmt: skip
    """What a tile of BLOCK_P rows from `first` reads: state, x, D and z, as they lie in memory.

    ROWS: those of a program, which the last one may have too many of. PACKED: the state as int32 words,
    see `unpack`.
    """
    p = first + tl.arange(0, BLOCK_P)
    p_in = inside(p, DIM, ROWS)
    p = p.to(INDEX)
    if PACKED:
        w = tl.arange(0, BLOCK_N // 2)
        words = state_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        ptrs = words + p[:, None] * (STATE_DIM // 2) + w[None, :]
        mask = p_in[:, None] & inside(w, D_STATE // 2, BLOCK_N // 2)[None, :]
        state = tl.load(ptrs, mask=mask, other=0, eviction_policy=LOAD)
    else:
        ptrs = state_ptr + p[:, None] * STATE_DIM + n[None, :] * STATE_N
        mask = p_in[:, None] & inside(n, D_STATE, BLOCK_N)[None, :]
        state = tl.load(ptrs, mask=mask, other=0.0, eviction_policy=LOAD)
    # Without this barrier the compiler, to save registers, puts some of these loads behind the arithmetic
    # on others, and the program waits for memory twice.
    tl.debug_barrier()
    x = tl.load(x_ptr + p * X_DIM, mask=p_in)
    D = x
    z = x
    if D_ptr is not None:
        D = tl.load(D_ptr + p * D_DIM, mask=p_in)
    if z_ptr is not None:
        z = tl.load(z_ptr + p * Z_DIM, mask=p_in)
    return state, x, D, z


@triton.jit
def _selective_state_update_kernel(
    state_ptr, x_ptr, dt_ptr, dt_bias_ptr, A_ptr, B_ptr, C_ptr, D_ptr, z_ptr, deltaA_ptr, out_ptr, slots_ptr,
    stride_state_slot, stride_state_head, stride_x_batch, stride_x_head, stride_dt_batch, stride_dt_head,
    stride_bias_head, stride_A_head, stride_B_batch, stride_B_group, stride_C_batch, stride_C_group,
    stride_D_head, stride_z_batch, stride_z_head, stride_deltaA_batch, stride_deltaA_head,
    stride_out_batch, stride_out_head,
    STATE_DIM: tl.constexpr, STATE_N: tl.constexpr, X_DIM: tl.constexpr, DT_DIM: tl.constexpr,
    BIAS_DIM: tl.constexpr, A_DIM: tl.constexpr, A_N: tl.constexpr, B_N: tl.constexpr, C_N: tl.constexpr,
    D_DIM: tl.constexpr, Z_DIM: tl.constexpr, DELTAA_DIM: tl.constexpr, OUT_DIM: tl.constexpr,
    INDEX: tl.constexpr,
    NHEADS: tl.constexpr, DIM: tl.constexpr, D_STATE: tl.constexpr, HEADS_PER_GROUP: tl.constexpr,
    SOFTPLUS: tl.constexpr, DISCRETIZATION: tl.constexpr, TIED: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr,
    PACKED: tl.constexpr, LOAD: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """Program pid = (batch * NHEADS + head) * parts + part updates state[slot, head, p, :].

    p: TILES tiles of BLOCK_P rows of DIM, each loaded before the one ahead is updated; n: BLOCK_N >= D_STATE
    columns. The strides within a head are constants (STATE_DIM, ...), so that the loads of a tile have one
    address between them and follow each other at once. INDEX: the type of offsets within a head. TIED: A,
    dt, dt_bias and deltaA do not vary over p and n, so the decay is one number a program.
    """
    ROWS: tl.constexpr = BLOCK_P * TILES
    PARTS: tl.constexpr = (DIM + ROWS - 1) // ROWS
    pid = tl.program_id(0)
    begin = pid % PARTS * ROWS
    head = (pid // PARTS % NHEADS).to(tl.int64)
    batch = (pid // (PARTS * NHEADS)).to(tl.int64)
    group = head // HEADS_PER_GROUP
    n = tl.arange(0, BLOCK_N).to(INDEX)
    n_in = inside(n, D_STATE, BLOCK_N)

    out_ptr += batch * stride_out_batch + head * stride_out_head
    slot = batch
    if slots_ptr is not None:
        slot = tl.load(slots_ptr + batch).to(tl.int64)
        if slot < 0:  # a padding row: no state of its own
            for tile in tl.static_range(TILES):
                p = begin + tile * BLOCK_P + tl.arange(0, BLOCK_P)
                zero = tl.zeros((BLOCK_P,), out_ptr.dtype.element_ty)
                tl.store(out_ptr + p.to(INDEX) * OUT_DIM, zero, mask=p < DIM)
            return

    state_ptr += slot * stride_state_slot + head * stride_state_head
    x_ptr += batch * stride_x_batch + head * stride_x_head
    if D_ptr is not None:
        D_ptr += head * stride_D_head
    if z_ptr is not None:
        z_ptr += batch * stride_z_batch + head * stride_z_head
    tiles = (
        _load_tile(
            state_ptr, x_ptr, D_ptr, z_ptr, begin, n, STATE_DIM, STATE_N, X_DIM, D_DIM, Z_DIM,
            INDEX, DIM, D_STATE, ROWS, BLOCK_P, BLOCK_N, PACKED, LOAD,
        ),
    )  # fmt: skip

    dt_ptr += batch * stride_dt_batch + head * stride_dt_head
    A_ptr += head * stride_A_head
    if dt_bias_ptr is not None:
        dt_bias_ptr += head * stride_bias_head
    if deltaA_ptr is not None:
        deltaA_ptr += batch * stride_deltaA_batch + head * stride_deltaA_head
    dt_bias = 0.0
    decay_dt = 0.0
    if TIED:
        dt = tl.load(dt_ptr)
        A = tl.load(A_ptr)
        if dt_bias_ptr is not None:
            dt_bias = tl.load(dt_bias_ptr)
        if deltaA_ptr is not None:
            decay_dt = tl.load(deltaA_ptr)
    B = tl.load(B_ptr + batch * stride_B_batch + group * stride_B_group + n * B_N, mask=n_in, other=0.0)
    C = tl.load(C_ptr + batch * stride_C_batch + group * stride_C_group + n * C_N, mask=n_in, other=0.0)

    for tile in tl.static_range(TILES):
        first = begin + tile * BLOCK_P
        if tile + 1 < TILES:
            tiles += (
                _load_tile(
                    state_ptr, x_ptr, D_ptr, z_ptr, first + BLOCK_P, n, STATE_DIM, STATE_N,
                    X_DIM, D_DIM, Z_DIM, INDEX, DIM, D_STATE, ROWS, BLOCK_P, BLOCK_N, PACKED, LOAD,
                ),
            )  # fmt: skip
        p = first + tl.arange(0, BLOCK_P)
        p_in = inside(p, DIM, ROWS)
        both_in = p_in[:, None] & n_in[None, :]
        p = p.to(INDEX)
        if not TIED:
            dt = _load_or_zero(dt_ptr, p * DT_DIM, p_in)[:, None]
            A = _load_or_zero(A_ptr, p[:, None] * A_DIM + n[None, :] * A_N, both_in)
            if dt_bias_ptr is not None:
                dt_bias = _load_or_zero(dt_bias_ptr, p * BIAS_DIM, p_in)[:, None]
            if deltaA_ptr is not None:
                decay_dt = _load_or_zero(deltaA_ptr, p * DELTAA_DIM, p_in)[:, None]
        if tile == 0 or not TIED:
            delta = dt.to(tl.float32)
            if dt_bias_ptr is not None:
                delta += dt_bias.to(tl.float32)
            if SOFTPLUS:
                delta = softplus(delta)
            delta_decay = delta
            if deltaA_ptr is not None:
                delta_decay = decay_dt.to(tl.float32)
            decay, gain = _discretize(delta_decay, delta, A.to(tl.float32), DISCRETIZATION)
        state, x, D, z = tiles[tile]
        x = x.to(tl.float32)
        if PACKED:
            state = unpack(state, state_ptr.dtype.element_ty)
        state = state.to(tl.float32) * decay + (B.to(tl.float32)[None, :] * gain) * x[:, None]
        state_ptrs = state_ptr + p[:, None] * STATE_DIM + n[None, :] * STATE_N
        tl.store(state_ptrs, state.to(state_ptr.dtype.element_ty), mask=both_in, cache_modifier=STORE)
        y = tl.sum(state * C.to(tl.float32)[None, :], axis=1)
        if D_ptr is not None:
            y += D.to(tl.float32) * x
        if z_ptr is not None:
            y *= silu(z.to(tl.float32))
        tl.store(out_ptr + p * OUT_DIM, y.to(out_ptr.dtype.element_ty), mask=p_in)


@triton.jit
def _discretize(decay_dt, dt, A, DISCRETIZATION: tl.constexpr):
    """The decay and the gain of one step, see `discretization`. One return: Triton 3.6 compares them all."""
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
    return decay, gain


def config_for(dim: int, d_state: int, itemsize: int, tied: bool) -> dict[str, int | str]:
    """Tiles of 4 KB of state a warp; of a 16-bit state that is not tied two of 1 KB, as A takes registers.

    On an H200, batch 256, 80 heads x 64 x 128: 326 us in fp32, 164 us in bf16; not tied 331 and 187 us (bf16
    in tiles of 4 KB: 243 us).
    """
    block_n = triton.next_power_of_2(d_state)
    tiles = 2 if itemsize == 2 and not tied and dim * block_n >= 1024 else 1
    elements = 2048 if itemsize == 2 and tied else 1024 // tiles
    rows = max(4, elements // block_n)
    return {"BLOCK_P": min(rows, triton.next_power_of_2(dim)), "TILES": tiles, "num_warps": 1}


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
    config: dict[str, int | str] | None = None,
) -> torch.Tensor:
    """Run the kernel on tensors with a head axis; see `selective_state_update` for the shapes."""
    batch, nheads, dim = x.shape
    d_state = state.shape[-1]
    tied = A.stride(-1) == 0 and all(
        t is None or t.stride(-1) == 0 for t in (A.transpose(-1, -2), dt, dt_bias, deltaA)
    )
    config = config or config_for(dim, d_state, state.element_size(), tied)
    config = {"TILES": 1, "LOAD": "", "STORE": "", **config}
    out = torch.empty_like(x)
    parts = triton.cdiv(dim, config["BLOCK_P"] * config["TILES"])

    def strides(tensor: torch.Tensor | None, rank: int) -> tuple[int, ...]:
        return (0,) * rank if tensor is None else tensor.stride()

    state_strides, A_strides, B_strides, C_strides = state.stride(), A.stride(), B.stride(), C.stride()
    D_strides, bias_strides = strides(D, 2), strides(dt_bias, 2)
    rows = [x.stride(), dt.stride(), strides(z, 3), strides(deltaA, 3), out.stride()]
    within = dict(
        STATE_DIM=state_strides[2], STATE_N=state_strides[3], A_DIM=A_strides[1], A_N=A_strides[2],
        B_N=B_strides[2], C_N=C_strides[2], D_DIM=D_strides[1], BIAS_DIM=bias_strides[1],
        X_DIM=rows[0][2], DT_DIM=rows[1][2], Z_DIM=rows[2][2], DELTAA_DIM=rows[3][2], OUT_DIM=rows[4][2],
    )  # fmt: skip
    furthest = (max(within.values()) + 1) * (dim + d_state + config["BLOCK_P"] * config["TILES"])
    even = [state.storage_offset(), *state_strides[:3], d_state]
    packed = state.dtype.itemsize == 2 and state_strides[3] == 1 and all(size % 2 == 0 for size in even)
    with torch.cuda.device_of(x):
        _selective_state_update_kernel[(batch * nheads * parts,)](
            state, x, dt, dt_bias, A, B, C, D, z, deltaA, out, slots,
            *state_strides[:2], *rows[0][:2], *rows[1][:2], bias_strides[0], A_strides[0], *B_strides[:2],
            *C_strides[:2], D_strides[0], *rows[2][:2], *rows[3][:2], *rows[4][:2],
            **within, INDEX=tl.int32 if furthest < 2**31 else tl.int64,
            NHEADS=nheads, DIM=dim, D_STATE=d_state, HEADS_PER_GROUP=nheads // B.shape[1],
            SOFTPLUS=dt_softplus, DISCRETIZATION=discretization, TIED=tied,
            BLOCK_N=triton.next_power_of_2(d_state), PACKED=packed, **config,
        )  # fmt: skip
    return out
