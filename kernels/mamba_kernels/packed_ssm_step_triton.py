"""Triton kernel of the decode step's recurrence on a packed state: some heads fold, the others are read.

It follows `packed_prepare_triton`'s in the stream. The rows of a head are read in `packed_read_triton`, and
folded in `packed_fold_triton`.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from mamba_kernels.backend import interpreting
from mamba_kernels.decode_norm_triton import early_start, start_next, wait_for_previous
from mamba_kernels.packed_fold_triton import fold_rows
from mamba_kernels.packed_output_triton import store_squares
from mamba_kernels.packed_prepare_triton import common_of, launch_prepare, multiplied_as_loaded
from mamba_kernels.packed_products_triton import is_among
from mamba_kernels.packed_read_triton import read_rows
from mamba_kernels.packed_state import LayerFormat, PackedState, head_table
from mamba_kernels.state_codes import FORMATS, first_key
from mamba_kernels.state_codes_triton import per_word


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
                zero = tl.zeros((ROWS,), scaled_ptr.dtype.element_ty)
                tl.store(scaled_ptr + batch * stride_scaled + head * HEADDIM + p, zero, mask=p < HEADDIM)
                if NORM != "none":
                    parts = squares_ptr + batch * stride_squares + head * FOLD_TILES
                    store_squares(parts, tile, tl.zeros((1,), tl.float32), ROWS // FOLD_P, FOLD_TILES)
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
        if is_among(KIND, KINDS):
            if KINDS == 1 << KIND or kind == KIND:
                if folding:
                    fold_rows(
                        zxbcdt_ptr, codes_ptr + begin.to(tl.int64) * 4, scales_ptr, past_x_ptr, past_B_ptr,
                        past_dt_ptr, position_ptr, columns_ptr, dt_bias_ptr, A_log_ptr, D_ptr,
                        norm_weight_ptr, scaled_ptr, squares_ptr, seed, dt_min, dt_max, stride_in,
                        stride_scales, stride_x, stride_B, stride_dt, stride_D_head, stride_scaled,
                        stride_squares, tile, head, batch, slot, KIND, NHEADS, HEADDIM, D_STATE,
                        HEADS_PER_GROUP, WINDOW, STOCHASTIC, D_P, GATE, NORM, FOLD_TILES, FOLD_P, BLOCK_N,
                        BLOCK_AGE, PDL, INTERPRET,
                    )  # fmt: skip
                elif WINDOW > 1:
                    read_rows(
                        zxbcdt_ptr, codes_ptr + begin.to(tl.int64) * 4, scales_ptr, past_x_ptr, position_ptr,
                        columns_ptr, D_ptr, norm_weight_ptr, scaled_ptr, squares_ptr, weights_ptr, parts_ptr,
                        halves_ptr, unit_ptr, stride_in, stride_scales, stride_x, stride_D_head,
                        stride_scaled, stride_squares, tile, head, batch, slot, KIND, NHEADS, HEADDIM,
                        D_STATE, HEADS_PER_GROUP, WINDOW, is_among(KIND, AS_LOADED), D_P, GATE, NORM,
                        FOLD_TILES, BLOCK_P, FOLD_P, BLOCK_N, BLOCK_AGE, PDL, INTERPRET,
                    )  # fmt: skip


def config_for(batch: int, format: LayerFormat, headdim: int, d_state: int) -> dict[str, int]:
    """Block sizes: 8192 numbers that are read, half of that in fp32, and 2048 in a fold, by two warps.

    Programs are small and have few registers a thread (of an SM's 65536, for 64 threads: 12 programs of 80,
    10 of 96), as memory is kept busy by many beside each other. A small batch is cut finer, as the time is
    then that of one program: below 1000 programs, some seven for each SM of an H200.
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
    format, headdim, d_state = packed.format, packed.headdim, packed.d_state
    batch, nheads = zxbcdt.shape[0], len(format.heads)
    config = config or config_for(batch, format, headdim, d_state)
    parts = triton.cdiv(headdim, config["FOLD_P"])
    folds = batch * triton.cdiv(nheads, format.window) * parts
    reads = batch * nheads * triton.cdiv(headdim, config["BLOCK_P"]) if format.window > 1 else 0
    norm = "none" if norm_weight is None else "norm_first" if norm_before_gate else "gate_first"
    common = common_of(packed)
    # Half of the readings follow the last fold.
    each = reads // (2 * folds)
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
            STOCHASTIC=format.rounding == "stochastic", D_P=D.stride(1) if D.dim() == 2 else 0, GATE=gate,
            NORM=norm, EACH=each, BLOCK_N=max(8, triton.next_power_of_2(d_state)),
            BLOCK_AGE=triton.next_power_of_2(format.window),
            INTERPRET=interpreting(), **config, **early_start(pdl, zxbcdt),
        )  # fmt: skip
    return nheads * parts
