"""Triton kernel of the decode step's recurrence on a packed state.

What `packed_prepare_triton` makes comes before it in the stream. All heads are read, in `packed_read_triton`,
and those whose turn it is then move on, in `packed_fold_triton`.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from mamba_kernels.backend import interpreting
from mamba_kernels.decode_norm_triton import early_start, inside, start_next, wait_for_previous
from mamba_kernels.packed_fold_triton import fold_rows, load_inputs
from mamba_kernels.packed_output_triton import finish, load_gate
from mamba_kernels.packed_prepare_triton import common_of, launch_prepare, multiplied_as_loaded
from mamba_kernels.packed_read_triton import load_codes, multiply
from mamba_kernels.packed_rows_triton import load_scale
from mamba_kernels.packed_ssm_step import Preparation
from mamba_kernels.packed_state import PackedState, head_table
from mamba_kernels.state_codes import first_key
from mamba_kernels.state_codes_triton import is_among, per_word, rounding_key


@triton.jit(do_not_specialize=["folds", "seed"])
def _packed_ssm_step_kernel(
    zxbcdt_ptr, codes_ptr, scales_ptr, past_x_ptr, past_B_ptr, position_ptr, columns_ptr, heads_ptr,
    slots_ptr, D_ptr, norm_weight_ptr, scaled_ptr, squares_ptr, weights_ptr, parts_ptr, halves_ptr,
    bfloats_ptr, unit_ptr,
    folds, seed, stride_in, stride_codes, stride_scales, stride_x, stride_B, stride_D_head, stride_scaled,
    stride_squares,
    NHEADS: tl.constexpr, HEADDIM: tl.constexpr, D_STATE: tl.constexpr, HEADS_PER_GROUP: tl.constexpr,
    WINDOW: tl.constexpr, KINDS: tl.constexpr, AS_LOADED: tl.constexpr, STOCHASTIC: tl.constexpr,
    D_P: tl.constexpr, GATE: tl.constexpr, NORM: tl.constexpr, BLOCK_P: tl.constexpr, FOLD_P: tl.constexpr,
    EACH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_AGE: tl.constexpr, PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """`folds` of the programs advance FOLD_P rows of a head whose turn it is to fold; the others BLOCK_P,
    some at a time where their format is wide, see `rows_of`.

    A fold computes where a reading waits for memory, so they alternate, a fold before every EACH readings;
    the folds end before the readings do, as one of them takes several times as long. EACH 0: folds first.
    fold = (batch * FOLDING + i) * FOLD_TILES + tile: the i-th head of that slot whose turn it is.
    reading = (batch * NHEADS + head) * TILES + tile: there is nothing to do where the head folds.
    stride_codes: in units of 16 bytes. heads_ptr: (NHEADS, 2) int32, the index of a head's format in
    STATE_DTYPES, and where its codes begin, in the same units; not read where all heads have one format.
    weights_ptr to unit_ptr: a `Common`. squares_ptr: (batch, NHEADS * FOLD_TILES) sums of squares.
    KINDS: bit i is set where the layer has heads of format i; AS_LOADED: where they are multiplied as
    `multiplied_as_loaded` says.
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
                zero = tl.zeros((ROWS,), tl.float32)
                finish(
                    zero, zero, zero, scaled_ptr + batch * stride_scaled + head * HEADDIM,
                    squares_ptr, batch * stride_squares + head * FOLD_TILES, tile, p, p < HEADDIM, False,
                    NORM, ROWS // FOLD_P, FOLD_TILES,
                )  # fmt: skip
            return
    position = tl.load(position_ptr + slot)
    if folding:
        # Head h folds where (position + h) % WINDOW == WINDOW - 1.
        head = (WINDOW - 1) - position % WINDOW + head * WINDOW
        if head >= NHEADS:
            return
    elif (position + head) % WINDOW == WINDOW - 1:
        return
    kind = 0
    begin = head
    if KINDS & (KINDS - 1) != 0:
        kind = tl.load(heads_ptr + 2 * head)
        begin = tl.load(heads_ptr + 2 * head + 1)
    codes_ptr = codes_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + slot * stride_codes * 4
    for KIND in tl.static_range(6):
        if KINDS == 1 << KIND:
            WORDS: tl.constexpr = (D_STATE + per_word(KIND) - 1) // per_word(KIND)
            begin = head * ((HEADDIM * WORDS + 3) // 4)
        if is_among(KIND, KINDS):
            if KINDS == 1 << KIND or kind == KIND:
                begin_ptr = codes_ptr + begin.to(tl.int64) * 4
                ROWS: tl.constexpr = rows_of(KIND, BLOCK_P, FOLD_P)
                if folding:
                    _advance_rows(
                        zxbcdt_ptr, begin_ptr, scales_ptr, past_x_ptr, past_B_ptr, columns_ptr, D_ptr,
                        norm_weight_ptr, scaled_ptr, squares_ptr, weights_ptr, parts_ptr, halves_ptr,
                        bfloats_ptr, unit_ptr, seed, stride_in, stride_scales, stride_x, stride_B,
                        stride_D_head, stride_scaled, stride_squares, tile, head, batch, slot, position, KIND,
                        NHEADS, HEADDIM, D_STATE, HEADS_PER_GROUP, WINDOW, is_among(KIND, AS_LOADED),
                        STOCHASTIC, D_P, GATE, NORM, FOLD_TILES, FOLD_P, FOLD_P, True, BLOCK_N, BLOCK_AGE,
                        PDL, INTERPRET,
                    )  # fmt: skip
                elif WINDOW > 1:
                    parts = BLOCK_P // ROWS
                    if HEADDIM % BLOCK_P != 0:
                        # What lies past the head is not masked where parts divide it.
                        parts = tl.minimum(parts, (HEADDIM + ROWS - 1) // ROWS - tile * (BLOCK_P // ROWS))
                    for part in range(parts):
                        _advance_rows(
                            zxbcdt_ptr, begin_ptr, scales_ptr, past_x_ptr, past_B_ptr, columns_ptr, D_ptr,
                            norm_weight_ptr, scaled_ptr, squares_ptr, weights_ptr, parts_ptr, halves_ptr,
                            bfloats_ptr, unit_ptr, seed, stride_in, stride_scales, stride_x, stride_B,
                            stride_D_head, stride_scaled, stride_squares, tile * (BLOCK_P // ROWS) + part,
                            head, batch, slot, position, KIND, NHEADS, HEADDIM, D_STATE, HEADS_PER_GROUP,
                            WINDOW, is_among(KIND, AS_LOADED), STOCHASTIC, D_P, GATE, NORM, FOLD_TILES, ROWS,
                            FOLD_P, False, BLOCK_N, BLOCK_AGE, PDL, INTERPRET,
                        )  # fmt: skip


@triton.constexpr_function
def rows_of(kind, rows, fold):
    """How many rows of format `kind` are read at once, where `rows` are of 8 bits a number or fewer.

    No fewer than are folded: a sum of squares has a part for so many rows. Nor than a product on the tensor
    cores takes, which fp32 does not use.
    """
    least = fold if kind == 0 else max(16, fold)
    return min(rows, max(least, rows * per_word(kind) // 4))


@triton.jit
def _advance_rows(
    zxbcdt_ptr, codes_ptr, scales_ptr, past_x_ptr, past_B_ptr, columns_ptr, D_ptr, norm_weight_ptr,
    scaled_ptr, squares_ptr, weights_ptr, parts_ptr, halves_ptr, bfloats_ptr, unit_ptr,
    seed, stride_in, stride_scales, stride_x, stride_B, stride_D_head, stride_scaled, stride_squares,
    tile, head, batch, slot, position,
    KIND: tl.constexpr, NHEADS: tl.constexpr, HEADDIM: tl.constexpr, D_STATE: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr, WINDOW: tl.constexpr, AS_LOADED: tl.constexpr, STOCHASTIC: tl.constexpr,
    D_P: tl.constexpr, GATE: tl.constexpr, NORM: tl.constexpr, SQUARES: tl.constexpr, ROWS: tl.constexpr,
    FOLD_P: tl.constexpr, FOLDS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_AGE: tl.constexpr,
    PDL: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Tile `tile` of ROWS rows of a head of format KIND, whose codes are at codes_ptr, reads this token:

        y = decay C stored + sum over the window of weight_i x_i + (D + weight_now) x

    with the decay and the weights of `packed_prepare_triton`. SQUARES: parts of the sum of squares of a head.
    FOLDS: it is the head's turn to fold.
    """
    GROUPS: tl.constexpr = NHEADS // HEADS_PER_GROUP
    D_SSM: tl.constexpr = NHEADS * HEADDIM
    group = head // HEADS_PER_GROUP
    p = tile * ROWS + tl.arange(0, ROWS)
    p_in = inside(p, HEADDIM, ROWS)
    ring = tl.arange(0, BLOCK_AGE)
    ring_in = inside(ring, WINDOW, BLOCK_AGE)
    scales_ptr += slot * stride_scales + head * HEADDIM
    past_x_ptr += slot * stride_x + head * HEADDIM
    # All that no kernel of this token writes. Volatile loads stay in order, ahead of all that waits for one
    # of them: else the compiler has them wait for each other.
    codes = load_codes(codes_ptr, p, p_in, KIND, AS_LOADED, D_STATE, BLOCK_N)
    scale = load_scale(scales_ptr, p, p_in, KIND)
    past_x_ptrs = past_x_ptr + (ring * D_SSM)[:, None] + p[None, :]
    past_x = tl.load(past_x_ptrs, mask=ring_in[:, None] & p_in[None, :], other=0.0, volatile=True)
    D = tl.load(D_ptr + head * stride_D_head + p * D_P, mask=p_in, other=0.0).to(tl.float32)
    norm_weight = D
    if NORM != "none":
        norm_weight = tl.load(norm_weight_ptr + head * HEADDIM + p, mask=p_in, other=0.0)

    wait_for_previous(PDL)
    z_ptr = zxbcdt_ptr + batch * stride_in + head * HEADDIM
    C_ptr = zxbcdt_ptr + batch * stride_in + 2 * D_SSM + (GROUPS + group) * D_STATE
    weights_ptr += (slot * NHEADS + head) * (2 + 2 * WINDOW)
    x = tl.load(z_ptr + D_SSM + p, mask=p_in, other=0.0)
    z = load_gate(z_ptr, p, p_in, GATE)
    decay = tl.load(weights_ptr)
    weight_now = tl.load(weights_ptr + 1)
    weight = tl.load(weights_ptr + 2 + ring, mask=ring_in, other=0.0)
    now = position % WINDOW
    if FOLDS:
        window_x, window_B, factors = load_inputs(
            past_x_ptr, past_B_ptr + slot * stride_B + group * D_STATE, weights_ptr + 2 + WINDOW, D_SSM,
            GROUPS * D_STATE, now, p, p_in, KIND, D_STATE, WINDOW, BLOCK_N,
        )  # fmt: skip
    columns = columns_ptr
    if columns_ptr is not None:
        columns = columns_ptr + head * D_STATE
    y = multiply(
        codes, C_ptr, columns, parts_ptr, halves_ptr, bfloats_ptr, unit_ptr, slot * GROUPS + group, KIND,
        AS_LOADED, D_STATE, BLOCK_N, INTERPRET,
    )  # fmt: skip
    y *= scale * decay
    y += tl.sum(past_x.to(tl.float32) * weight[:, None], axis=0) + (D + weight_now) * x.to(tl.float32)
    finish(
        y, z, norm_weight, scaled_ptr + batch * stride_scaled + head * HEADDIM, squares_ptr,
        batch * stride_squares + head * SQUARES, tile, p, p_in, GATE, NORM, ROWS // FOLD_P, SQUARES,
    )  # fmt: skip
    if FOLDS:
        fold_rows(
            codes, scale, window_x, window_B, factors, x, decay, now, p, p_in, codes_ptr, scales_ptr, columns,
            rounding_key(seed, position, head), KIND, D_STATE, STOCHASTIC, BLOCK_N, INTERPRET,
        )  # fmt: skip
    # This token's place in the window is one that no head still reads.
    tl.store(past_x_ptr + now * D_SSM + p, x, mask=p_in)


def config_for(batch: int, packed: PackedState) -> dict[str, int]:
    """Block sizes of programs of one warp, which waits for no other: 8192 codes of 8 bits are read, and 2048
    numbers folded. Of other inputs than bfloat16, whose products alone are the tensor cores', no more are
    folded than fit the registers: 1024 numbers, of up to 8 rows.

    A small batch is cut finer, as the time is then that of one program: below 1000 programs, some seven for
    each SM of an H200.
    """
    block_n = max(8, triton.next_power_of_2(packed.d_state))
    rows = max(4, min(8192 // block_n, triton.next_power_of_2(packed.headdim)))
    while rows > 16 and batch * len(packed.format.heads) * triton.cdiv(packed.headdim, rows) < 1000:
        rows //= 2
    if packed.x.dtype == torch.bfloat16:
        fold = max(4, 2048 // block_n)
    else:
        fold = max(4, min(8, 1024 // block_n))
    return {"BLOCK_P": rows, "FOLD_P": min(rows, fold), "num_warps": 1, "num_stages": 1, "maxnreg": 128}


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
    prepared: bool,
    pdl: bool,
    config: dict[str, Any] | None,
) -> int:
    """Advance the state of every row of zxbcdt; return how many parts of squares a row has."""
    format, headdim, d_state = packed.format, packed.headdim, packed.d_state
    batch, nheads = zxbcdt.shape[0], len(format.heads)
    config = config or config_for(batch, packed)
    parts = triton.cdiv(headdim, config["FOLD_P"])
    folds = batch * triton.cdiv(nheads, format.window) * parts
    reads = batch * nheads * triton.cdiv(headdim, config["BLOCK_P"]) if format.window > 1 else 0
    norm = "none" if norm_weight is None else "norm_first" if norm_before_gate else "gate_first"
    common = common_of(packed)
    # Half of the readings follow the last fold. Three formats at once, read and folded, would be more
    # instructions than an SM's cache holds.
    each = 0 if format.kinds.bit_count() > 2 else reads // (2 * folds)
    with torch.cuda.device_of(zxbcdt):
        if not prepared:
            launch_prepare(zxbcdt, Preparation(packed, dt_bias, A_log, dt_limit), slots, pdl)
        _packed_ssm_step_kernel[(folds + reads,)](
            zxbcdt, packed.codes, packed.scales, packed.x, packed.B, packed.position, packed.columns,
            head_table(format, headdim, d_state, zxbcdt.device), slots, D, norm_weight, scaled, squares,
            *common,
            folds, first_key(format.seed), zxbcdt.stride(0), packed.codes.stride(0) // 16,
            packed.scales.stride(0), packed.x.stride(0), packed.B.stride(0), D.stride(0), scaled.stride(0),
            0 if squares is None else squares.stride(0),
            NHEADS=nheads, HEADDIM=headdim, D_STATE=d_state, HEADS_PER_GROUP=nheads // ngroups,
            WINDOW=format.window, KINDS=format.kinds, AS_LOADED=multiplied_as_loaded(packed),
            STOCHASTIC=format.rounding == "stochastic", D_P=D.stride(1) if D.dim() == 2 else 0, GATE=gate,
            NORM=norm, EACH=each, BLOCK_N=max(8, triton.next_power_of_2(d_state)),
            BLOCK_AGE=triton.next_power_of_2(format.window),
            INTERPRET=interpreting(), **config, **early_start(pdl, zxbcdt),
        )  # fmt: skip
    return nheads * parts
