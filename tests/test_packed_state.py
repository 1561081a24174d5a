"""What a packed state keeps of numbers, and where it keeps them."""

import pytest
import torch

from mamba_kernels.backend import use_backend
from mamba_kernels.packed_state import (
    STATE_DTYPES,
    LayerFormat,
    advance_positions,
    empty_packed_state,
    recur,
)
from mamba_kernels.state_codes import FORMATS, decode, encode, rounding_keys

SCALED = [dtype for dtype in STATE_DTYPES if FORMATS[dtype].largest]
CPU = torch.device("cpu")


def rounded(state, dtype, keys=None):
    words, scales = encode(state, dtype, keys)
    return decode(words, scales, dtype, state.shape[-1])


def keys_of(heads, token=0, seed=0):
    heads = torch.arange(heads)
    return rounding_keys(seed, torch.full_like(heads, token), heads)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("d_state", [1, 16, 20, 33, 128])
@pytest.mark.parametrize("dtype", STATE_DTYPES)
def test_every_number_comes_back_within_a_step_of_its_format(dtype, d_state):
    state = randn(3, 7, d_state)
    step = {"fp32": 0, "bf16": 2**-7, "fp16": 2**-10, "int8": 1 / 127, "fp8": 2**-3, "int4": 1 / 7}[dtype]
    size = state.abs().amax(-1, keepdim=True) if dtype.startswith("int") else state.abs()
    least = state.abs().amax(-1, keepdim=True) * {"fp8": 2**-17, "fp16": 2**-40}.get(dtype, 0)
    for keys, share in ((None, 0.501), (keys_of(3), 1.001)):
        error = (rounded(state, dtype, keys) - state).abs()
        assert (error <= share * (step * size + least) + 1e-30).all()


@pytest.mark.parametrize(
    "dtype, cast", [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp8", torch.float8_e4m3fn)]
)
def test_rounding_to_nearest_is_the_cast(dtype, cast):
    state = randn(64, 8, 32) * torch.logspace(-6, 2, 64)[:, None, None]
    largest = FORMATS[dtype].largest
    if largest is None:
        assert torch.equal(rounded(state, dtype), state.to(cast).float())
        return
    words, scales = encode(state, dtype, None)
    steps = state * (torch.full_like(scales, largest) / state.abs().amax(-1))[..., None]
    expected = steps.clamp(-largest, largest).to(cast).float()
    assert torch.equal(decode(words, torch.ones_like(scales), dtype, 32), expected)


@pytest.mark.parametrize("dtype", STATE_DTYPES[1:])
def test_stochastic_rounding_is_right_on_average_and_takes_a_neighbour(dtype):
    row = torch.linspace(-1, 1, 32)[None, None] * 0.9
    row[..., -1] = 1.0  # the scale's
    draws = 4000
    found = rounded(row.expand(draws, 1, 32), dtype, keys_of(draws))
    values = found[:, 0]
    steps = values.amax(0) - values.amin(0)
    assert all(len(values[:, n].unique()) <= 2 for n in range(32))
    deviation = steps / 2 / draws**0.5
    assert ((values.double().mean(0) - row[0, 0].double()).abs() <= 5 * deviation + 1e-6).all()
    assert (steps > 0).sum() > 16


@pytest.mark.parametrize("dtype", SCALED)
def test_a_step_far_below_the_quantum_still_gets_through(dtype):
    """Rounding to nearest would lose it each time."""
    state = torch.full((20000, 1, 16), 0.5)
    state[..., 0] = 1.0
    coarse = rounded(state[:1], dtype)[0, 0, 1]
    push = {"fp16": 2.0**-22, "fp8": 2.0**-12, "int4": 2e-3}.get(dtype, 1e-4)
    near = torch.full_like(state, 1.0)
    near[..., 1:] = coarse + push
    found = rounded(near, dtype, keys_of(20000)).double()[..., 1:]
    assert abs((found - coarse).mean().item() / push - 1) < 0.1


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("dtype", STATE_DTYPES)
def test_extreme_rows_stay_finite_and_zero_stays_zero(dtype, rounding):
    rows = torch.tensor([0.0, 1e-45, 1e-38, 1e-20, 1.0, 1e30, 3.4e38])
    state = rows[:, None, None] * torch.linspace(-1, 1, 9)
    found = rounded(state, dtype, keys_of(7) if rounding == "stochastic" else None)
    assert torch.isfinite(found).all()
    assert (found[0] == 0).all()
    assert ((found[3:, 0, -1] / rows[3:] - 1).abs() < 0.01).all()


def test_random_numbers_differ_by_seed_token_head_row_and_column():
    state = torch.full((2, 64, 64), 0.5 / 127)
    state[..., 0] = 1.0
    base = rounded(state, "int8", keys_of(2, token=5, seed=1))[..., 1:]
    for other in (keys_of(2, token=6, seed=1), keys_of(2, token=5, seed=2)):
        same = (rounded(state, "int8", other)[..., 1:] == base).float().mean()
        assert 0.45 < same < 0.55
    for axis in range(3):
        first, second = base.select(axis, 0), base.select(axis, 1)
        assert 0.3 < (first == second).float().mean() < 0.7
    assert torch.equal(base, rounded(state, "int8", keys_of(2, token=5, seed=1))[..., 1:])


@pytest.mark.parametrize(
    "bits, dtype", [(32, "fp32"), (16, "bf16"), (16, "fp16"), (8, "int8"), (8, "fp8"), (4, "int4")]
)
def test_codes_take_the_bits_of_their_format(bits, dtype):
    packed = empty_packed_state(LayerFormat((dtype,) * 3), 2, 3, 64, 128, 1, torch.bfloat16, CPU)
    assert packed.codes.nbytes == 2 * 3 * 64 * 128 * bits // 8
    assert packed.nbytes == sum(tensor.untyped_storage().nbytes() for tensor in packed.tensors())


def test_segments_of_mixed_heads_are_aligned_and_do_not_overlap():
    format = LayerFormat(("int4", "fp32", "int8", "int4", "fp16"))
    groups = format.groups(headdim=5, d_state=20)
    assert sorted(head for group in groups for head in group.heads) == [0, 1, 2, 3, 4]
    end = 0
    for group in groups:
        assert group.begin == end and group.size % 16 == 0
        end = group.end


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize(
    "heads", [("int8",) * 3, ("fp8", "int4", "fp32"), ("int4", "int8", "int4"), ("bf16", "fp16", "bf16")]
)
def test_each_head_of_a_packed_state_is_rounded_to_its_own_format(heads, rounding):
    state = randn(4, 3, 5, 20)
    packed = empty_packed_state(LayerFormat(heads, rounding), 4, 3, 5, 20, 1, torch.float32, CPU)
    packed.pack_(state, torch.tensor([3, 9, 1, 3]))
    assert packed.position.tolist() == [3, 9, 1, 3]
    found = packed.unpack(-torch.ones(3))
    for slot, token in enumerate([2, 8, 0, 2]):
        for head, dtype in enumerate(heads):
            keys = keys_of(3, token)[head : head + 1] if rounding == "stochastic" else None
            expected = rounded(state[slot, head : head + 1], dtype, keys)
            assert torch.equal(found[slot, head : head + 1], expected)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize(
    "heads", [(dtype,) * 2 for dtype in STATE_DTYPES] + [("int8", "int4"), ("fp32", "fp8")]
)
@pytest.mark.parametrize("d_state, columns", [(20, True), (64, False)])
def test_the_kernels_pack_to_the_same_bytes_and_unpack_the_window(device, heads, rounding, d_state, columns):
    factor = torch.rand(2, d_state, generator=torch.Generator().manual_seed(2)) + 0.5 if columns else None
    state = (3 * randn(3, 2, 5, d_state)).to(device)
    state[1, 0, 2] = 0
    states = []
    for backend in ("torch", "triton"):
        packed = empty_packed_state(
            LayerFormat(heads, rounding, window=4, seed=5), 3, 2, 5, d_state, 2, torch.float32, device, factor
        )
        with use_backend(backend):
            packed.pack_(
                state.transpose(0, 1).contiguous().transpose(0, 1), torch.tensor([6, 3, 8]).to(device)
            )
        states.append(packed)
    reference, ours = states
    for name in ("codes", "scales", "dt", "position"):
        assert torch.equal(getattr(ours, name), getattr(reference, name)), name

    for name in ("x", "B"):
        getattr(ours, name).copy_(randn(*getattr(ours, name).shape, seed=3))
    ours.dt.copy_(randn(*ours.dt.shape, seed=4).abs())
    A = torch.tensor([-0.3, -2.0], device=device)
    found = []
    for backend in ("torch", "triton"):
        with use_backend(backend):
            found.append(ours.unpack(A))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [1, 16, 17])
def test_the_kernel_unpacks_windows_that_are_unrolled_and_longer_ones(device, window):
    """17 is the shortest that is a loop. Each slot is at another place of its window."""
    packed = empty_packed_state(
        LayerFormat(("int8", "fp32"), window=window), window, 2, 5, 16, 1, torch.float32, device
    )
    packed.pack_(randn(window, 2, 5, 16, seed=1).to(device), torch.arange(window).to(device) + window)
    for name in ("x", "B", "dt"):
        tensor = getattr(packed, name)
        tensor.copy_(randn(*tensor.shape, seed=2).abs())
    A = torch.tensor([-0.3, -2.0], device=device)
    found = []
    for backend in ("torch", "triton"):
        with use_backend(backend):
            found.append(packed.unpack(A))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)


def test_column_factors_even_out_columns_of_different_size():
    columns = torch.logspace(-2, 2, 32).expand(2, 32)
    state = randn(3, 2, 8, 32) * columns[:, None, :]
    plain, outer = (
        empty_packed_state(LayerFormat(("int8",) * 2), 3, 2, 8, 32, 1, torch.float32, CPU, columns=factor)
        for factor in (None, columns)
    )
    errors = []
    for packed in (plain, outer):
        packed.pack_(state, 0)
        errors.append(((packed.unpack(-torch.ones(2)) - state).abs() / columns[:, None]).mean())
    assert errors[1] < errors[0] / 5


def test_the_window_is_forgotten_when_a_state_is_handed_over():
    packed = empty_packed_state(LayerFormat(("fp32",) * 2), 2, 2, 4, 16, 1, torch.float32, CPU)
    for tensor in (packed.x, packed.B, packed.dt):
        tensor.fill_(3.0)
    state = randn(2, 2, 4, 16)
    packed.pack_(state, 5)
    assert torch.equal(packed.unpack(-torch.ones(2)), state)


def test_unpacking_replays_the_window_of_a_mamba1_layer():
    """One head of d_inner rows, each with a dt of its own, and A by row and column."""
    d_inner, d_state, window, tokens = 6, 16, 4, 7
    format = LayerFormat(("fp32",), window=window)
    packed = empty_packed_state(format, 2, 1, d_inner, d_state, 1, torch.float64, CPU, dt_per_row=True)
    A = -torch.rand(d_inner, d_state, dtype=torch.float64)
    state = torch.zeros(2, 1, d_inner, d_state, dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    for token in range(tokens):
        x, dt = torch.rand(2, 2, d_inner, generator=generator, dtype=torch.float64)
        B = torch.rand(2, 1, d_state, generator=generator, dtype=torch.float64)
        state = recur(state, x[:, None], B, dt, A)
        if token % window == window - 1:
            packed.pack_(state, token)
        else:
            for name, value in (("x", x[:, None]), ("B", B), ("dt", dt)):
                getattr(packed, name)[:, token % window] = value
        advance_positions([packed])
    torch.testing.assert_close(packed.unpack(A), state.float(), rtol=1e-5, atol=1e-6)


def test_slices_of_slots_are_views_and_copies_are_not():
    packed = empty_packed_state(LayerFormat(("int8", "int4")), 4, 2, 4, 16, 1, torch.float32, CPU)
    copy = packed.map(torch.clone)
    packed.map(lambda tensor: tensor[2:3]).pack_(randn(1, 2, 4, 16), 7)
    found = packed.unpack(-torch.ones(2))
    assert found[2].any() and not found[[0, 1, 3]].any()
    assert not copy.unpack(-torch.ones(2)).any()
    assert copy.map(lambda tensor: tensor.repeat_interleave(3, 0)).slots == 12


def test_positions_count_the_slots_that_took_part():
    states = [empty_packed_state(LayerFormat(("int8",)), 4, 1, 4, 16, 1, torch.float32, CPU) for _ in "ab"]
    advance_positions(states)
    advance_positions(states, torch.tensor([2, -1, 0]))
    assert [state.position.tolist() for state in states] == [[2, 1, 2, 1]] * 2


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(heads=("int7",)), "heads: expected formats of"),
        (dict(heads=()), "heads: expected a format for each head"),
        (dict(heads=("int8",), rounding="up"), "rounding: expected nearest or stochastic"),
        (dict(heads=("int8",), window=0), "window: expected at least 1 token"),
    ],
)
def test_a_format_that_does_not_exist_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LayerFormat(**options)


def test_a_state_of_another_shape_is_refused():
    packed = empty_packed_state(LayerFormat(("int8",) * 2), 1, 2, 4, 16, 1, torch.float32, CPU)
    with pytest.raises(ValueError, match="state: expected shape"):
        packed.pack_(torch.zeros(1, 2, 4, 15), 0)
    with pytest.raises(ValueError, match="A: expected shape"):
        packed.unpack(torch.zeros(3))
    with pytest.raises(ValueError, match="format: expected 3 heads"):
        empty_packed_state(LayerFormat(("int8",) * 2), 1, 3, 4, 16, 1, torch.float32, CPU)
