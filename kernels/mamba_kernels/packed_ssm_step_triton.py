"""Triton kernel of the decode step's recurrence on a packed state."""

from typing import Any

import torch
import triton
import triton.language as tl

from mamba_kernels.backend import interpreting
from mamba_kernels.decode_norm_triton import early_start, inside, start_next, wait_for_previous
from mamba_kernels.packed_integers_triton import integer_dot, load_bytes, nibbles
from mamba_kernels.packed_prepare_triton import (
    Common,
    chunk_as_operand,
    empty_common,
    halves_as_operand,
    launch_prepare,
    load_chunk,
    load_halves,
    load_halves_chunk,
    load_parts,
    multiplied_as_loaded,
    sum_halves,
    sum_parts,
)
from mamba_kernels.packed_state import LayerFormat, PackedState, head_table
from mamba_kernels.packed_window_triton import (
    inverse_columns,
    load_columns,
    load_scale,
    load_words,
    stored_and_window,
)
from mamba_kernels.state_codes import FORMATS, first_key
from mamba_kernels.state_codes_triton import (
    FP16,
    INT4,
    INT8,
    decode,
    decoded_unit,
    encode,
    is_integer,
    is_scaled,
    per_word,
    rounding_key,
)
from mamba_kernels.triton_math import silu, softplus


@triton.jit(do_not_specialize=["seed", "folds"])
def _packed_ssm_step_kernel(
    zxbcdt_ptr, codes_ptr, scales_ptr, past_x_ptr, past_B_ptr, past_dt_ptr, position_ptr, columns_ptr,
    heads_ptr, slots_ptr, dt_bias_ptr, A_log_ptr, D_ptr, norm_weight_ptr, scaled_ptr, squares_ptr,
    weights_ptr, parts_ptr, halves_ptr, unit_ptr,
    folds, seed, dt_min, dt_max, stride_in, stride_codes, stride_scales, stride_x, stride_B, stride_dt,
    stride_D_head, stride_scaled, stride_squares,
    NHEADS: tl.constexpr, HEADDIM: tl.constexpr, D_STATE: tl.constexpr, HEADS_PER_GROUP: tl.constexpr,
    WINDOW: tl.constexpr, KINDS: tl.constexpr, AS_LOADED: tl.constexpr, STOCHASTIC: tl.constexpr,
    D_P: tl.constexpr, GATE: tl.constexpr, NORM: tl.constexpr,
    BLOCK_P: tl.constexpr, FOLD_P: tl.constexpr, EACH: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_AGE: tl.constexpr, PDL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """`folds` of the programs fold FOLD_P rows of a head whose turn it is, the others read BLOCK_P of one.

    A fold computes where a reading waits for memory, so they alternate, a fold before every EACH readings;
    the folds end before the readings do, as one of them takes several times as long. EACH 0: folds first.
    fold = (batch * FOLDING + i) * FOLD_TILES + tile: the i-th head of that slot whose turn it is.
    reading = (batch * NHEADS + head) * TILES + tile: there is nothing to do where the head folds.
    stride_codes: in units of 16 bytes. heads_ptr: (NHEADS, 2) int32, the index of a head's format in
    STATE_DTYPES, and where its codes begin, in the same units. KINDS: bit i is set where the layer has heads
    of format i; AS_LOADED: where they are multiplied as `multiplied_as_loaded` says.
    """
    TILES: tl.constexpr = (HEADDIM + BLOCK_P - 1) // BLOCK_P
    FOLD_TILES: tl.constexpr = (HEADDIM + FOLD_P - 1) // FOLD_P
    FOLDING: tl.constexpr = (NHEADS + WINDOW - 1) // WINDOW
    start_next(PDL)
    pid = tl.program_id(0)
    turn = pid // (1 + EACH)
    folding = (pid % (1 + EACH) == 0) & (turn < folds)
    if folding:
        tile = turn % FOLD_TILES
        head = turn // FOLD_TILES % FOLDING
        batch = (turn // (FOLD_TILES * FOLDING)).to(tl.int64)
    else:
        pid -= tl.minimum(turn + 1, folds)
        tile = pid % TILES
        head = pid // TILES % NHEADS
        batch = (pid // (TILES * NHEADS)).to(tl.int64)
    slot = batch
    if slots_ptr is not None:
        slot = tl.load(slots_ptr + batch).to(tl.int64)
        if slot < 0:  # a padding row: no state of its own
            if WINDOW == 1 or not folding:
                ROWS: tl.constexpr = FOLD_P if WINDOW == 1 else BLOCK_P
                wait_for_previous(PDL)
                p = tile * ROWS + tl.arange(0, ROWS)
                zero = tl.zeros((ROWS,), scaled_ptr.dtype.element_ty)
                tl.store(scaled_ptr + batch * stride_scaled + head * HEADDIM + p, zero, mask=p < HEADDIM)
                if NORM != "none":
                    parts = squares_ptr + batch * stride_squares + head * FOLD_TILES
                    _store_parts(parts, tile, tl.zeros((1,), tl.float32), ROWS // FOLD_P, FOLD_TILES)
            return
    if folding:
        # Head h folds where (position + h) % WINDOW == WINDOW - 1.
        position = tl.load(position_ptr + slot)
        head = (WINDOW - 1) - position % WINDOW + head * WINDOW
        if head >= NHEADS:
            return
    codes_ptr = codes_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + slot * stride_codes * 4
    kind = 0
    begin = head
    if KINDS & (KINDS - 1) != 0:
        kind = tl.load(heads_ptr + 2 * head)
        begin = tl.load(heads_ptr + 2 * head + 1)
    for KIND in tl.static_range(6):
        if KINDS == 1 << KIND:
            WORDS: tl.constexpr = (D_STATE + per_word(KIND) - 1) // per_word(KIND)
            begin = head * ((HEADDIM * WORDS + 3) // 4)
        if (KINDS >> KIND) & 1 != 0:
            if KINDS == 1 << KIND or kind == KIND:
                if folding:
                    _fold_rows(
                        zxbcdt_ptr, codes_ptr + begin.to(tl.int64) * 4, scales_ptr, past_x_ptr, past_B_ptr,
                        past_dt_ptr, position_ptr, columns_ptr, dt_bias_ptr, A_log_ptr, D_ptr,
                        norm_weight_ptr, scaled_ptr, squares_ptr, seed, dt_min, dt_max, stride_in,
                        stride_scales, stride_x, stride_B, stride_dt, stride_D_head, stride_scaled,
                        stride_squares, tile, head, batch, slot, KIND, NHEADS, HEADDIM, D_STATE,
                        HEADS_PER_GROUP, WINDOW, STOCHASTIC, D_P, GATE, NORM, FOLD_TILES, FOLD_P, BLOCK_N,
                        BLOCK_AGE, PDL, INTERPRET,
                    )  # fmt: skip
                elif WINDOW > 1:
                    _read_rows(
                        zxbcdt_ptr, codes_ptr + begin.to(tl.int64) * 4, scales_ptr, past_x_ptr, position_ptr,
                        columns_ptr, D_ptr, norm_weight_ptr, scaled_ptr, squares_ptr, weights_ptr, parts_ptr,
                        halves_ptr, unit_ptr, stride_in, stride_scales, stride_x, stride_D_head,
                        stride_scaled, stride_squares, tile, head, batch, slot, KIND, NHEADS, HEADDIM,
                        D_STATE, HEADS_PER_GROUP, WINDOW, (AS_LOADED >> KIND) & 1 != 0, D_P, GATE, NORM,
                        FOLD_TILES, BLOCK_P, FOLD_P, BLOCK_N, BLOCK_AGE, PDL, INTERPRET,
                    )  # fmt: skip


@triton.jit
def _read_rows(
    zxbcdt_ptr, codes_ptr, scales_ptr, past_x_ptr, position_ptr, columns_ptr, D_ptr, norm_weight_ptr,
    scaled_ptr, squares_ptr, weights_ptr, parts_ptr, halves_ptr, unit_ptr,
    stride_in, stride_scales, stride_x, stride_D_head, stride_scaled, stride_squares,
    tile, head, batch, slot,
    KIND: tl.constexpr, NHEADS: tl.constexpr, HEADDIM: tl.constexpr, D_STATE: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr, WINDOW: tl.constexpr, AS_LOADED: tl.constexpr, D_P: tl.constexpr,
    GATE: tl.constexpr, NORM: tl.constexpr, PARTS: tl.constexpr, BLOCK_P: tl.constexpr,
    FOLD_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_AGE: tl.constexpr, PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """Rows of a head of format KIND that does not fold now: its codes, at codes_ptr, are only read."""
    FIELDS: tl.constexpr = per_word(KIND)
    WORDS: tl.constexpr = (D_STATE + FIELDS - 1) // FIELDS
    BLOCK_W: tl.constexpr = BLOCK_N // FIELDS
    GROUPS: tl.constexpr = NHEADS // HEADS_PER_GROUP
    D_SSM: tl.constexpr = NHEADS * HEADDIM
    INTEGER: tl.constexpr = is_integer(KIND) and BLOCK_W >= 8  # the least that tl.dot takes
    group = head // HEADS_PER_GROUP
    w = tl.arange(0, BLOCK_W)
    p = tile * BLOCK_P + tl.arange(0, BLOCK_P)
    p_in = inside(p, HEADDIM, BLOCK_P)
    # All that no kernel of this token writes, before it is known whether the head folds. Volatile loads stay
    # in order, ahead of all that waits for one of them: else the compiler has them wait for each other.
    position = tl.load(position_ptr + slot, volatile=True)
    scale = load_scale(scales_ptr + slot * stride_scales + head * HEADDIM, p, p_in, KIND)
    chunks = ()
    if AS_LOADED:
        for chunk in tl.static_range(WORDS // 16):
            if KIND == FP16:
                chunks += (load_halves_chunk(codes_ptr, chunk, p, p_in, D_STATE),)
            else:
                chunks += (load_chunk(codes_ptr, chunk, p, p_in, 4 * WORDS),)
    elif INTEGER:
        codes = load_bytes(codes_ptr, p, p_in, WORDS, BLOCK_W)
    else:
        codes = load_words(codes_ptr, p, p_in, w, WORDS, BLOCK_W)
    past_x_ptr += slot * stride_x + head * HEADDIM
    ring = tl.arange(0, BLOCK_AGE)
    ring_in = inside(ring, WINDOW, BLOCK_AGE)
    past_x_ptrs = past_x_ptr + (ring * D_SSM)[:, None] + p[None, :]
    past_x = tl.load(past_x_ptrs, mask=ring_in[:, None] & p_in[None, :], other=0.0, volatile=True)
    D = tl.load(D_ptr + head * stride_D_head + p * D_P, mask=p_in, other=0.0).to(tl.float32)
    norm_weight = D
    if NORM != "none":
        norm_weight = tl.load(norm_weight_ptr + head * HEADDIM + p, mask=p_in, other=0.0)
    if (position + head) % WINDOW == WINDOW - 1:
        return
    now = position % WINDOW
    weights_ptr += (slot * NHEADS + head) * (1 + WINDOW)

    wait_for_previous(PDL)
    z_ptr = zxbcdt_ptr + batch * stride_in + head * HEADDIM
    x_now = tl.load(z_ptr + D_SSM + p, mask=p_in, other=0.0)
    z = _load_gate(z_ptr, p, p_in, GATE)
    decay = tl.load(weights_ptr)
    weight_now = tl.load(weights_ptr + 1 + now)
    weight = tl.load(weights_ptr + 1 + ring, mask=ring_in & (ring != now), other=0.0)
    unit_ptr += (slot * GROUPS + group) * 2
    if AS_LOADED and KIND == FP16:
        halves_ptr += (slot * GROUPS + group) * (8 * D_STATE)
        sums = tl.zeros((BLOCK_P, 8), tl.float32)
        for chunk in tl.static_range(WORDS // 16 - 1, -1, -1):  # the one that was loaded last, first
            halves = halves_as_operand(chunks[chunk], BLOCK_P)
            sums = tl.dot(halves, load_halves(halves_ptr, chunk, D_STATE), sums)
        y = sum_halves(sums) * tl.load(unit_ptr + 1)
    elif AS_LOADED:
        ROW: tl.constexpr = (D_STATE + 3) // 4 * 4
        parts_ptr += (slot * GROUPS + group) * (3 * 8 * ROW)
        sums = tl.zeros((BLOCK_P, 8), tl.int32)
        for chunk in tl.static_range(WORDS // 16 - 1, -1, -1):  # the one that was loaded last, first
            if KIND == INT8:
                lower = chunks[chunk]
            else:
                lower, upper = nibbles(chunks[chunk], INTERPRET)
                upper = chunk_as_operand(upper, BLOCK_P)
                sums = tl.dot(upper, load_parts(parts_ptr + 16 * ROW, chunk, ROW), sums, out_dtype=tl.int32)
            lower = chunk_as_operand(lower, BLOCK_P)
            C_parts = load_parts(parts_ptr + (0 if KIND == INT8 else 8 * ROW), chunk, ROW)
            sums = tl.dot(lower, C_parts, sums, out_dtype=tl.int32)
        y = sum_parts(sums) * tl.load(unit_ptr)
        if KIND == INT4:
            y *= 1 / 16
    else:
        C_ptr = zxbcdt_ptr + batch * stride_in + 2 * D_SSM + (GROUPS + group) * D_STATE
        columns = columns_ptr
        if columns_ptr is not None:
            columns = columns_ptr + head * D_STATE
        if INTEGER:
            y = integer_dot(codes, C_ptr, columns, KIND, WORDS, D_STATE, BLOCK_W, INTERPRET)
        else:
            fields = decode(codes, KIND)
            products = tl.zeros((BLOCK_P, BLOCK_W), tl.float32)
            for field in tl.static_range(FIELDS):
                C_part = load_columns(C_ptr, w, field, WORDS, D_STATE, BLOCK_W)
                if columns_ptr is not None and is_scaled(KIND):
                    C_part *= load_columns(columns, w, field, WORDS, D_STATE, BLOCK_W)
                products += fields[field] * C_part[None, :]
            y = tl.sum(products, axis=1) * decoded_unit(KIND)
    y *= scale * decay
    y += tl.sum(past_x.to(tl.float32) * weight[:, None], axis=0) + (D + weight_now) * x_now.to(tl.float32)
    scaled_ptr += batch * stride_scaled + head * HEADDIM
    square = _finish(y, z, norm_weight, scaled_ptr, p, p_in, GATE, NORM)
    if NORM != "none":
        parts = squares_ptr + batch * stride_squares + head * PARTS
        _store_parts(parts, tile, square, BLOCK_P // FOLD_P, PARTS)
    # This token's place in the window is one that no head still reads.
    tl.store(past_x_ptr + now * D_SSM + p, x_now, mask=p_in)


@triton.jit
def _fold_rows(
    zxbcdt_ptr, codes_ptr, scales_ptr, past_x_ptr, past_B_ptr, past_dt_ptr, position_ptr, columns_ptr,
    dt_bias_ptr, A_log_ptr, D_ptr, norm_weight_ptr, scaled_ptr, squares_ptr,
    seed, dt_min, dt_max, stride_in, stride_scales, stride_x, stride_B, stride_dt, stride_D_head,
    stride_scaled, stride_squares, tile, head, batch, slot,
    KIND: tl.constexpr, NHEADS: tl.constexpr, HEADDIM: tl.constexpr, D_STATE: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr, WINDOW: tl.constexpr, STOCHASTIC: tl.constexpr, D_P: tl.constexpr,
    GATE: tl.constexpr, NORM: tl.constexpr, PARTS: tl.constexpr, FOLD_P: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_AGE: tl.constexpr, PDL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Rows of a head of format KIND that folds now: its codes, at codes_ptr, move on to this token."""
    FIELDS: tl.constexpr = per_word(KIND)
    BLOCK_W: tl.constexpr = BLOCK_N // FIELDS
    D_SSM: tl.constexpr = NHEADS * HEADDIM
    BC: tl.constexpr = NHEADS // HEADS_PER_GROUP * D_STATE
    group = head // HEADS_PER_GROUP
    w = tl.arange(0, BLOCK_W)
    p = tile * FOLD_P + tl.arange(0, FOLD_P)
    p_in = inside(p, HEADDIM, FOLD_P)
    position = tl.load(position_ptr + slot)
    A = -tl.exp(tl.load(A_log_ptr + head).to(tl.float32))
    dt_bias = tl.load(dt_bias_ptr + head).to(tl.float32)
    D = tl.load(D_ptr + head * stride_D_head + p * D_P, mask=p_in, other=0.0).to(tl.float32)
    norm_weight = D
    if NORM != "none":
        norm_weight = tl.load(norm_weight_ptr + head * HEADDIM + p, mask=p_in, other=0.0)
    scales_ptr += slot * stride_scales + head * HEADDIM
    past_x_ptr += slot * stride_x + head * HEADDIM
    past_B_ptr += slot * stride_B + group * D_STATE
    past_dt_ptr += slot * stride_dt + head
    columns = columns_ptr
    if columns_ptr is not None:
        columns = columns_ptr + head * D_STATE

    state = stored_and_window(
        codes_ptr, scales_ptr, columns, past_x_ptr, past_B_ptr, past_dt_ptr, 0.0, A, position,
        (position + head) % WINDOW, p, p_in, w, KIND, NHEADS, D_STATE, D_SSM, BC, WINDOW, BLOCK_W, BLOCK_AGE,
    )  # fmt: skip

    wait_for_previous(PDL)
    row = zxbcdt_ptr + batch * stride_in
    z_ptr = row + head * HEADDIM
    B_ptr = row + 2 * D_SSM + group * D_STATE
    dt = tl.load(row + 2 * D_SSM + 2 * BC + head).to(tl.float32)
    x_now = tl.load(z_ptr + D_SSM + p, mask=p_in, other=0.0)
    z = _load_gate(z_ptr, p, p_in, GATE)
    dt = tl.minimum(tl.maximum(softplus(dt + dt_bias), dt_min), dt_max)
    x = x_now.to(tl.float32)
    key = rounding_key(seed, position, head)
    y = D * x
    y += _fold(
        state, codes_ptr, scales_ptr, columns, B_ptr, B_ptr + BC, dt * x, tl.exp(A * dt), key, p, p_in, w,
        KIND, D_STATE, STOCHASTIC, FOLD_P, BLOCK_W, INTERPRET,
    )  # fmt: skip
    scaled_ptr += batch * stride_scaled + head * HEADDIM
    square = _finish(y, z, norm_weight, scaled_ptr, p, p_in, GATE, NORM)
    if NORM != "none":
        _store_parts(squares_ptr + batch * stride_squares + head * PARTS, tile, square, 1, PARTS)
    at = position % WINDOW
    tl.store(past_x_ptr + at * D_SSM + p, x_now, mask=p_in)


@triton.jit
def _store_parts(parts_ptr, tile, square, COUNT: tl.constexpr, PARTS: tl.constexpr):
    """Store square (1,) as the first of a tile's COUNT parts, zero as the others; a head has PARTS."""
    i = tl.arange(0, COUNT)
    part = tile * COUNT + i
    tl.store(parts_ptr + part, tl.where(i == 0, tl.broadcast_to(square, (COUNT,)), 0.0), mask=part < PARTS)


@triton.jit
def _fold(
    past, codes_ptr, scales_ptr, columns, B_ptr, C_ptr, input, decay, key, p, p_in, w,
    KIND: tl.constexpr, D_STATE: tl.constexpr, STOCHASTIC: tl.constexpr, FOLD_P: tl.constexpr,
    BLOCK_W: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Round the rows p (FOLD_P,) of a state, decay * past + input B, into its codes; return C h."""
    FIELDS: tl.constexpr = per_word(KIND)
    WORDS: tl.constexpr = (D_STATE + FIELDS - 1) // FIELDS
    state = ()
    for field in tl.static_range(FIELDS):
        B = load_columns(B_ptr, w, field, WORDS, D_STATE, BLOCK_W)
        state += (past[field] * decay + input[:, None] * B[None, :],)
    products = tl.zeros((FOLD_P, BLOCK_W), tl.float32)
    rounded = ()
    for field in tl.static_range(FIELDS):
        products += state[field] * load_columns(C_ptr, w, field, WORDS, D_STATE, BLOCK_W)[None, :]
        part = state[field]
        if columns is not None and is_scaled(KIND):
            part *= inverse_columns(columns, w, field, WORDS, D_STATE, BLOCK_W)[None, :]
        rounded += (part,)
    words, scale = encode(rounded, p, w, key, KIND, WORDS, STOCHASTIC, INTERPRET)
    word_in = p_in[:, None] & inside(w, WORDS, BLOCK_W)[None, :]
    tl.store(codes_ptr + (p * WORDS)[:, None] + w[None, :], words, mask=word_in)
    if is_scaled(KIND):
        tl.store(scales_ptr + p, scale, mask=p_in)
    return tl.sum(products, axis=1)


@triton.jit
def _load_gate(z_ptr, p, p_in, GATE: tl.constexpr):
    """z of rows p, where there is a gate."""
    z = tl.zeros(p.shape, tl.float32)
    if GATE:
        z = tl.load(z_ptr + p, mask=p_in, other=0.0).to(tl.float32)
    return z


@triton.jit
def _finish(y, z, norm_weight, scaled_ptr, p, p_in, GATE: tl.constexpr, NORM: tl.constexpr):
    """Gate rows p and write them, times the norm's weight; return their sum of squares (1,)."""
    gated = y
    if GATE:
        gated = y * silu(z)
    scaled = gated
    if NORM != "none":
        scaled = gated * norm_weight.to(tl.float32)
    tl.store(scaled_ptr + p, scaled.to(scaled_ptr.dtype.element_ty), mask=p_in)
    normed = y if NORM == "norm_first" else gated
    return tl.sum(tl.where(p_in, normed * normed, 0.0), axis=0, keep_dims=True)


def config_for(batch: int, format: LayerFormat, headdim: int, d_state: int) -> dict[str, int]:
    """Block sizes: 8192 numbers that are read, half of that in fp32, and 2048 in a fold, by two warps.

    Few registers a thread, for many programs beside each other. A small batch is cut finer, as the time is
    then that of one program.
    """
    block_n = max(8, triton.next_power_of_2(d_state))
    wide = any(FORMATS[dtype].bits > 8 for dtype in format.heads)
    numbers = 4096 if "fp32" in format.heads else 8192
    threads = {"num_warps": 2, "maxnreg": 96 if wide else 80}
    if batch * len(format.heads) * headdim * block_n < 1000 * numbers:
        numbers, threads = 2048, {"num_warps": 1}

    def rows(numbers: int) -> int:
        return min(max(4, numbers // block_n), triton.next_power_of_2(headdim))

    return {"BLOCK_P": rows(numbers), "FOLD_P": rows(2048), **threads}


def launch_packed_ssm_step(
    zxbcdt: torch.Tensor,
    packed: PackedState,
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
    gate: bool,
    slots: torch.Tensor | None,
    pdl: bool,
    config: dict[str, Any] | None,
) -> int:
    """Advance the state of every row of zxbcdt; return how many parts of squares a row has."""
    batch, nheads, headdim, d_state = (
        zxbcdt.shape[0],
        len(packed.format.heads),
        packed.headdim,
        packed.d_state,
    )
    format = packed.format
    config = config or config_for(batch, format, headdim, d_state)
    parts = triton.cdiv(headdim, config["FOLD_P"])
    folds = batch * triton.cdiv(nheads, format.window) * parts
    reads = batch * nheads * triton.cdiv(headdim, config["BLOCK_P"]) if format.window > 1 else 0
    norm = "none" if norm_weight is None else "norm_first" if norm_before_gate else "gate_first"
    common = packed.work.setdefault("common", None) or empty_common(packed)
    packed.work["common"] = common
    assert isinstance(common, Common)
    with torch.cuda.device_of(zxbcdt):
        launch_prepare(
            zxbcdt, packed, dt_bias, A_log, common, ngroups=ngroups, dt_limit=dt_limit, slots=slots, pdl=pdl
        )
        _packed_ssm_step_kernel[(folds + reads,)](
            zxbcdt, packed.codes, packed.scales, packed.x, packed.B, packed.dt, packed.position,
            packed.columns, head_table(format, headdim, d_state, zxbcdt.device), slots, dt_bias, A_log, D,
            norm_weight, scaled, squares, *common,
            folds, first_key(format.seed), *dt_limit, zxbcdt.stride(0), packed.codes.stride(0) // 16,
            packed.scales.stride(0), packed.x.stride(0), packed.B.stride(0), packed.dt.stride(0),
            D.stride(0), scaled.stride(0), 0 if squares is None else squares.stride(0),
            NHEADS=nheads, HEADDIM=headdim, D_STATE=d_state, HEADS_PER_GROUP=nheads // ngroups,
            WINDOW=format.window, KINDS=format.kinds, AS_LOADED=multiplied_as_loaded(packed),
            STOCHASTIC=format.rounding == "stochastic",
            D_P=D.stride(1) if D.dim() == 2 else 0, GATE=gate, NORM=norm,
            EACH=reads // (2 * folds),
            BLOCK_N=max(8, triton.next_power_of_2(d_state)), BLOCK_AGE=triton.next_power_of_2(format.window),
            INTERPRET=interpreting(), **config, **early_start(pdl, zxbcdt),
        )  # fmt: skip
    return nheads * parts
