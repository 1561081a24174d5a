"""The decode step on a packed state, beside the recurrence in float64 and its kernel beside its reference."""

from dataclasses import dataclass, replace

import pytest
import torch

from decode_testing import EPS, HALF_TYPES, randn
from kernel_testing import assert_close_as_reference
from mamba_kernels.backend import use_backend
from mamba_kernels.decode_norm import NormBuffers, normalise
from mamba_kernels.packed_ssm_step import packed_ssm_step, packed_ssm_step_ref
from mamba_kernels.packed_state import (
    STATE_DTYPES,
    LayerFormat,
    advance_positions,
    empty_packed_state,
    recur,
)

MIXED = ("int8", "int4", "fp8", "fp16", "bf16", "fp32")


@dataclass(frozen=True)
class Layer:
    """A layer of random parameters: the heads' formats in turn, and what decides about its kernel."""

    heads: tuple[str, ...]
    window: int = 3
    batch: int = 2
    headdim: int = 8
    d_state: int = 16
    ngroups: int = 1
    norm: str = "gate_first"  # "norm_first", "none", or "no_gate"
    rounding: str = "stochastic"
    columns: bool = False
    slots: tuple[int, ...] | None = None

    @property
    def nheads(self):
        return len(self.heads)

    @property
    def d_ssm(self):
        return self.nheads * self.headdim

    def parameters(self, dtype, device):
        D = randn(self.nheads, *([self.headdim] if self.norm == "norm_first" else []), seed=3)
        weight = randn(self.d_ssm, seed=4) if self.norm.endswith("first") else None
        found = dict(
            dt_bias=randn(self.nheads, seed=1) - 1, A_log=randn(self.nheads, seed=2), D=D, norm_weight=weight
        )
        return {name: value if value is None else value.to(device, dtype) for name, value in found.items()}

    def state(self, dtype, device):
        columns = None
        if self.columns:
            columns = torch.rand(self.nheads, self.d_state, generator=torch.Generator().manual_seed(5)) + 0.5
        packed = empty_packed_state(
            LayerFormat(self.heads, self.rounding, self.window, seed=7), 5 if self.slots else self.batch,
            self.nheads, self.headdim, self.d_state, self.ngroups, dtype, device, columns,
        )  # fmt: skip
        packed.position.copy_(torch.arange(packed.slots))  # sequences of different lengths
        return packed

    def row(self, token, dtype, device):
        width = 2 * self.d_ssm + 2 * self.ngroups * self.d_state + self.nheads
        return randn(self.batch, width, seed=100 + token).to(dtype).to(device)

    def step(self, step, row, packed, **options):
        """The normalised output (batch, d_ssm) of one token."""
        wide = torch.float64 if row.dtype == torch.float64 else torch.float32
        scaled = torch.full((self.batch, self.d_ssm), float("nan"), device=row.device, dtype=row.dtype)
        out = NormBuffers(scaled, torch.full_like(scaled, float("nan"), dtype=wide))
        slots = None if self.slots is None else torch.tensor(self.slots, device=row.device)
        normed = step(
            row, packed, **self.parameters(wide, row.device), eps=EPS, out=out, ngroups=self.ngroups,
            dt_limit=(0.05, 1.5), norm_before_gate=self.norm == "norm_first", gate=self.norm != "no_gate",
            state_batch_indices=slots, **options,
        )  # fmt: skip
        return normalise(normed)


def recurrence(layer, tokens):
    """y and the state after each token, in float64 throughout and never packed: the oracle of no_gate."""
    h, p, n, g = layer.nheads, layer.headdim, layer.d_state, layer.ngroups
    parameters = layer.parameters(torch.float64, "cpu")
    state = torch.zeros(layer.batch, h, p, n, dtype=torch.float64)
    for token in range(tokens):
        row = layer.row(token, torch.float64, "cpu")
        _, x, B, C, dt = row.split([h * p, h * p, g * n, g * n, h], 1)
        x, B, C = x.view(-1, h, p), B.view(-1, g, n), C.view(-1, g, n).repeat_interleave(h // g, 1)
        dt = torch.nn.functional.softplus(dt + parameters["dt_bias"]).clamp(0.05, 1.5)
        state = recur(state, x, B, dt, -parameters["A_log"].exp())
        y = (state * C[:, :, None]).sum(-1) + parameters["D"][:, None] * x
        yield row, y.flatten(1), state


@pytest.mark.parametrize("window", [1, 3, 8])
def test_a_window_changes_nothing_but_when_the_state_is_written(window):
    layer = Layer(("fp32",) * 4, window=window, headdim=5, d_state=20, ngroups=2, norm="no_gate")
    packed = layer.state(torch.float64, "cpu")
    A = -layer.parameters(torch.float64, "cpu")["A_log"].exp()
    for row, y, state in recurrence(layer, tokens=40):
        found = layer.step(packed_ssm_step_ref, row, packed)
        advance_positions([packed])
        assert ((found - y).norm() / y.norm()).item() < 1e-6
        last = state
    assert ((packed.unpack(A) - last).norm() / last.norm()).item() < 1e-6
    assert packed.position.tolist() == [40, 41]


@pytest.mark.parametrize("dtype", STATE_DTYPES)
def test_a_rounded_state_stays_near_the_recurrence(dtype):
    bound = {"fp32": 1e-6, "bf16": 0.02, "fp16": 2e-3, "int8": 0.05, "fp8": 0.15, "int4": 0.7}[dtype]
    layer = Layer((dtype,) * 4, window=4, d_state=32, norm="no_gate")
    packed = layer.state(torch.float64, "cpu")
    for row, y, _ in recurrence(layer, tokens=30):
        error = ((layer.step(packed_ssm_step_ref, row, packed) - y).norm() / y.norm()).item()
        advance_positions([packed])
        assert error < bound


LAYERS = [
    *[Layer((dtype,) * 2, d_state=32) for dtype in STATE_DTYPES],
    *[Layer((dtype,) * 2, window=1, headdim=5, d_state=20, norm="norm_first") for dtype in STATE_DTYPES],
    Layer(MIXED, ngroups=2, norm="none", columns=True),
    Layer(MIXED, ngroups=6, norm="no_gate", d_state=100, batch=1, rounding="nearest"),
    Layer(("int8", "int4"), window=8, d_state=64, columns=True, slots=(3, 0)),
    Layer(("int4", "int8", "fp8"), headdim=17, d_state=33, batch=3, slots=(1, -1, 4)),
    Layer(("int8",), d_state=256, window=2, norm="norm_first"),
    Layer(("int4",), d_state=256, headdim=64, batch=1, window=4),
    # Rows of one chunk and of several; with columns the same codes take the other way.
    Layer(("int8", "fp16", "fp8", "bf16"), d_state=64, window=2, batch=1),
    Layer(("int8", "int4", "fp16", "fp8", "bf16", "fp8"), d_state=128, ngroups=2, window=2, slots=(3, 0)),
    Layer(("int8", "fp8", "fp16", "bf16"), d_state=192, window=2, batch=1),  # of chunks, not a power of two
    Layer(("fp16", "int8"), d_state=96, window=2, batch=1),
    Layer(("int8", "int4", "fp16"), d_state=128, window=2, batch=1, columns=True),
    Layer(("int4", "fp16"), d_state=256, window=2, batch=1, columns=True),
    # The longest window that a fold multiplies in the smallest product, and the shortest in the next.
    Layer(("int8", "fp32"), window=16, headdim=4, batch=1),
    Layer(("int8", "fp32"), window=17, headdim=4, batch=1),
]


@pytest.mark.parametrize("dtype", [torch.float32, *HALF_TYPES])
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_the_kernel_reads_and_writes_what_the_reference_does(device, nan_filled_empty, layer, dtype):
    """Token by token from the reference's state, so that no two roundings follow each other."""
    packed = layer.state(dtype, device)
    tokens = 2 * layer.window + 1 if layer.window < 4 else layer.window + 2
    outputs = []
    for token in range(tokens):
        row = layer.row(token, dtype, device)
        inputs = {name: getattr(packed, name).double() for name in ("x", "B", "dt")}
        wide = replace(packed.map(torch.clone), **inputs)
        ours, before = packed.map(torch.clone), packed.map(torch.clone)
        with use_backend("triton"):
            found = layer.step(packed_ssm_step, row, ours)
        exact = layer.step(packed_ssm_step_ref, row.double(), wide)
        outputs.append((found, exact, layer.step(packed_ssm_step_ref, row, packed)))
        assert torch.equal(ours.x, packed.x) and torch.equal(ours.B, packed.B)
        torch.testing.assert_close(ours.dt, packed.dt, rtol=1e-5, atol=1e-6)
        assert_same_codes(ours, packed, before)
        advance_positions([packed], None if layer.slots is None else torch.tensor(layer.slots, device=device))
    assert_close_as_reference(*(torch.stack(each) for each in zip(*outputs, strict=True)))


def assert_same_codes(ours, theirs, before):
    """Stored states that differ by float32's rounding before their own: at most a step, and seldom."""
    slots = torch.arange(ours.slots, device=ours.codes.device)
    for head, dtype in enumerate(ours.format.heads):
        a, b, old = (state.stored(slots)[:, head] for state in (ours, theirs, before))
        step = {"fp32": 1e-5, "bf16": 2**-7, "fp16": 2**-9, "int8": 1 / 126, "fp8": 2**-3, "int4": 1 / 6.9}
        size = b.abs() if dtype not in ("int8", "int4") else b.abs().amax(-1, keepdim=True)
        if ours.columns is not None:
            size = size * 3  # columns vary by that
        least = b.abs().amax(-1, keepdim=True) * 1e-5
        assert ((a - b).abs() <= step[dtype] * size + least + 1e-6).all()
        if dtype != "fp32":
            assert ((a - b).abs() > 1e-4 * b.abs() + 1e-6).float().mean() < 0.02
        written = (a != old).flatten(1).any(1)
        assert torch.equal(written, (b != old).flatten(1).any(1))


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("heads", [(dtype,) * 2 for dtype in STATE_DTYPES] + [MIXED], ids="-".join)
def test_where_arithmetic_is_exact_the_bytes_are_the_same(device, heads, rounding):
    """No decay, and inputs that are small multiples of 1/8: of a first fold only the rounding decides."""
    layer = Layer(heads, window=4, headdim=16, d_state=32, norm="no_gate", rounding=rounding)
    states = [layer.state(torch.float32, device) for _ in range(2)]
    parameters = layer.parameters(torch.float32, device)
    parameters["A_log"].fill_(float("-inf"))
    parameters["D"].zero_()
    for token in range(4):
        row = (8 * layer.row(token, torch.float32, device)).round() / 8
        for packed, backend in zip(states, ("torch", "triton"), strict=True):
            out = NormBuffers(torch.empty(layer.batch, layer.d_ssm, device=device), None)
            with use_backend(backend):
                packed_ssm_step(
                    row, packed, **parameters, eps=EPS, out=out, ngroups=1, gate=False, dt_limit=(0.5, 0.5)
                )
        for name, ours, theirs in zip(
            ("codes", "scales", "x", "B", "dt"), states[1].tensors(), states[0].tensors(), strict=False
        ):
            assert torch.equal(ours, theirs), name
        advance_positions(states)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_row_alone_equals_the_row_in_a_batch_and_its_slot_does_not_matter(device, backend):
    layer = Layer(MIXED, window=3, batch=4, d_state=32, slots=(4, 1, 0, 2))
    alone = Layer(MIXED, window=3, batch=1, d_state=32)
    together, single = layer.state(torch.float32, device), alone.state(torch.float32, device)
    together.position.zero_()
    single.position.zero_()
    for token in range(7):
        row = layer.row(token, torch.float32, device)
        with use_backend(backend):
            found = layer.step(packed_ssm_step, row, together)
            expected = alone.step(packed_ssm_step, row[2:3], single)
        torch.testing.assert_close(found[2:3], expected, rtol=1e-5, atol=1e-5)
        advance_positions([together], torch.tensor(layer.slots, device=device))
        advance_positions([single])
    if backend == "triton":
        assert torch.equal(together.codes[0], single.codes[0])


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_padding_writes_zeros_and_changes_no_state(device, backend):
    layer = Layer(("int8", "int4"), window=2, batch=3, d_state=32, slots=(2, -1, 0))
    packed = layer.state(torch.float32, device)
    before = packed.map(torch.clone)
    row = layer.row(0, torch.float32, device)
    row[1] = float("nan")
    with use_backend(backend):
        found = layer.step(packed_ssm_step, row, packed)
    assert torch.isfinite(found).all() and not found[1].any() and found[0].any()
    for ours, old in zip(packed.tensors(), before.tensors(), strict=True):
        assert torch.equal(ours[[1, 3, 4]], old[[1, 3, 4]])
    assert not torch.equal(packed.x[0], before.x[0]) and not torch.equal(packed.dt[2], before.dt[2])


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_what_overflowed_in_a_slot_is_gone_when_another_sequence_takes_it(device, backend):
    layer = Layer(("int8", "fp32"), window=4, d_state=64)
    packed = layer.state(torch.float32, device)
    for past in (packed.x, packed.B, packed.dt):
        past.fill_(float("inf"))
    with use_backend(backend):
        packed.pack_(torch.zeros(layer.batch, layer.nheads, layer.headdim, layer.d_state, device=device), 0)
        for token in range(4):
            assert (
                layer.step(packed_ssm_step, layer.row(token, torch.float32, device), packed).isfinite().all()
            )
            advance_positions([packed])
    assert packed.scales.isfinite().all()


def test_float16_codes_meet_all_bits_of_C(device):
    """Beside a column that is 2^20 of the others in C, and zero in the state: a part too few is seen."""
    layer = Layer(("fp16",) * 2, window=8, d_state=64, norm="no_gate")
    packed = layer.state(torch.float32, device)
    state = randn(layer.batch, layer.nheads, layer.headdim, layer.d_state, seed=6).to(device)
    state[..., 0] = 0
    packed.pack_(state, 0)
    row = layer.row(0, torch.float32, device)
    row[:, layer.d_ssm : 2 * layer.d_ssm] = 0  # no input that the output could be large by
    row[:, 2 * layer.d_ssm + layer.d_state] = 2.0**20
    inputs = {name: getattr(packed, name).double() for name in ("x", "B", "dt")}
    exact = layer.step(packed_ssm_step_ref, row.double(), replace(packed.map(torch.clone), **inputs))
    reference = layer.step(packed_ssm_step_ref, row, packed.map(torch.clone))
    with use_backend("triton"):
        assert_close_as_reference(layer.step(packed_ssm_step, row, packed), exact, reference)


@pytest.mark.parametrize(
    ("config", "window"),
    [((16, 4, 1), 2), ((4, 4, 1), 2), ((4, 4, 1), 4), ((2, 1, 1), 3), ((8, 4, 1), 16), ((4, 4, 1), 17)],
)
def test_every_tiling_gives_the_same_and_so_every_order_of_folds_and_readings(device, config, window):
    """Four tokens around the first time that the window is full: each of the four heads folds at one.

    Folds stand first, or one before each reading or each two; with more than two formats all would be first.
    """
    heads = ("int4", "fp16", "fp16", "int4")
    layer = Layer(heads, window=window, batch=1, headdim=8, d_state=32, norm="norm_first")
    states = [layer.state(torch.float32, device)]
    tiles = dict(zip(("BLOCK_P", "FOLD_P", "num_warps"), config, strict=True))
    begin = max(0, window - 4)
    for token in range(begin):
        layer.step(packed_ssm_step_ref, layer.row(token, torch.float32, device), states[0])
        advance_positions(states)
    states.append(states[0].map(torch.clone))
    for token in range(begin, begin + 4):
        row = layer.row(token, torch.float32, device)
        with use_backend("triton"):
            expected = layer.step(packed_ssm_step, row, states[0])
            found = layer.step(packed_ssm_step, row, states[1], config=tiles)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        advance_positions(states)
    assert torch.equal(states[0].codes, states[1].codes)


@pytest.mark.parametrize("dtype", STATE_DTYPES)
@pytest.mark.parametrize(("headdim", "d_state"), [(64, 16), (64, 64), (64, 256), (48, 256)])
def test_the_tiling_of_a_large_batch_fits_rows_of_every_size(device, headdim, d_state, dtype):
    """Of narrow rows as many are folded at once as are read, in formats that are read in several parts.

    A tile that ends past the head may have whole parts there.
    """
    from mamba_kernels.packed_ssm_step_triton import config_for

    layer = Layer((dtype,), window=2, headdim=headdim, d_state=d_state)
    packed = layer.state(torch.float32, device)
    row, reference = layer.row(0, torch.float32, device), packed.map(torch.clone)
    config = config_for(1000, layer.state(torch.bfloat16, device))
    with use_backend("triton"):
        found = layer.step(packed_ssm_step, row, packed, config=config)
    expected = layer.step(packed_ssm_step_ref, row, reference)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(packed.x, reference.x)


def test_what_does_not_fit_is_refused(device):
    layer = Layer(("int8",) * 2)
    row, packed = layer.row(0, torch.float32, device), layer.state(torch.float32, device)
    with pytest.raises(ValueError, match="zxbcdt: expected shape"):
        layer.step(packed_ssm_step, row[:, :-1], packed)
    with use_backend("triton"), pytest.raises(ValueError, match=r"zxbcdt: expected torch\.float32, as"):
        layer.step(packed_ssm_step, row.bfloat16(), packed)
    with pytest.raises(ValueError, match="packed: expected at least 2 slots"):
        layer.step(packed_ssm_step, row, packed.map(lambda tensor: tensor[:1]))
    with pytest.raises(ValueError, match="norm_weight: expected None where there is no gate"):
        packed_ssm_step(
            row, packed, **layer.parameters(torch.float32, device), eps=EPS, ngroups=1, gate=False,
            out=NormBuffers.empty(2, layer.d_ssm, torch.float32, device),
        )  # fmt: skip
