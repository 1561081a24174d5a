"""The selective scan's kernels against the reference in float64: every kind of input, and every edge."""

import pytest
import torch

from kernel_testing import assert_close_as_reference
from mamba_kernels.backend import use_backend
from mamba_kernels.discretization import DISCRETIZATIONS
from mamba_kernels.selective_scan import selective_scan_fn, selective_scan_ref
from test_selective_scan import KINDS, make_inputs, run, to_float64

# Every variant takes seconds to compile for a GPU; in the interpreter it is the same source.
INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="its parts are tested on the GPU already")


def assert_kernel_as_good_as_torch(inputs, discretization="mamba", backward=True):
    exact = run(selective_scan_ref, to_float64(inputs), discretization, backward=backward)
    torch_results = run(selective_scan_ref, inputs, discretization, backward=backward)
    for name, found in run(selective_scan_fn, inputs, discretization, "triton", backward).items():
        try:
            assert_close_as_reference(found, exact[name], torch_results[name])
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


# "dirac" takes its steps as "mamba" does, "bilinear" as "zoh": these two meet every kind on a GPU as well.
RULES_AND_KINDS = [
    pytest.param(
        rule, *kind.values, id=f"{rule}-{kind.id}",
        marks=[INTERPRETED] if rule in ("dirac", "bilinear") and kind.id not in ("real", "complex") else [],
    )
    for rule in DISCRETIZATIONS
    for kind in KINDS
]  # fmt: skip


@pytest.mark.parametrize("discretization, kind", RULES_AND_KINDS)
def test_kernel_gradients_for_every_rule_and_kind(
    discretization, kind, device, short_stretches, nan_filled_empty
):
    # 20 channels: errors are compared by their mean, and a sum over the tokens has but a number a channel
    assert_kernel_as_good_as_torch(make_inputs(device, dim=20, seqlen=11, **kind), discretization)


@pytest.mark.parametrize("seqlen", [1, 3, 4, 5, 8, 9])
def test_kernel_gradients_at_the_edges_of_tiles_and_stretches(
    seqlen, device, short_stretches, nan_filled_empty
):
    assert_kernel_as_good_as_torch(make_inputs(device, seqlen=seqlen))


@pytest.mark.parametrize("seqlen", [1, 15, 16, 17, 33])
def test_kernel_output_at_the_edges_of_its_tiles(seqlen, device, nan_filled_empty):
    assert_kernel_as_good_as_torch(make_inputs(device, seqlen=seqlen), backward=False)


@pytest.mark.parametrize("d_state", [1, *(pytest.param(n, marks=INTERPRETED) for n in (2, 8, 16, 64)), 100])
def test_kernel_gradients_for_any_number_of_states(d_state, device, short_stretches, nan_filled_empty):
    assert_kernel_as_good_as_torch(make_inputs(device, dim=3, d_state=d_state, seqlen=6))


@pytest.mark.parametrize("kind", [{}, {"is_complex": True}])
def test_kernel_gradients_without_a_state_before_or_a_gradient_of_the_last(kind, device, short_stretches):
    inputs = make_inputs(device, seqlen=11, **kind)
    exact, torch_results, found = (
        run(function, {**given, "initial_state": None}, backend=backend, through_last_state=False)
        for function, given, backend in (
            (selective_scan_ref, to_float64(inputs), "torch"),
            (selective_scan_ref, inputs, "torch"),
            (selective_scan_fn, inputs, "triton"),
        )
    )
    for name in found:
        assert_close_as_reference(found[name], exact[name], torch_results[name])


def test_kernel_gradients_of_several_blocks_groups_and_sequences(device, nan_filled_empty, short_stretches):
    # 9 channels a group: with 16 states, one more than a backward program has, and two forward ones
    assert_kernel_as_good_as_torch(make_inputs(device, batch=2, dim=18, d_state=16, groups=2, seqlen=5))


@pytest.mark.parametrize("varying", ["B", "C"])
def test_kernel_gradients_where_one_of_B_and_C_is_constant(varying, device, short_stretches):
    assert_kernel_as_good_as_torch(make_inputs(device, seqlen=6, varying=varying))


def test_kernel_reads_and_writes_channel_last_tensors(device, short_stretches, nan_filled_empty):
    inputs = make_inputs(device, batch=2, seqlen=9, channel_last=True)
    inputs["B"] = inputs["B"].transpose(-1, -2).contiguous().transpose(-1, -2)
    assert_kernel_as_good_as_torch(inputs)
    with use_backend("triton"):
        u = inputs["u"].transpose(1, 2).contiguous().transpose(1, 2)
        out = selective_scan_fn(u, inputs["delta"], inputs["A"], inputs["B"], inputs["C"])
    assert out.stride() == u.stride()


def test_kernel_gradients_of_half_precision_tensors(device, short_stretches):
    dtype = torch.float16  # bfloat16, which the interpreter truncates to: with the long sequences
    inputs = make_inputs(device, seqlen=9, dtype=dtype)
    results = run(selective_scan_fn, inputs, backend="triton")
    assert results["out"].dtype == results["ddelta"].dtype == results["dB"].dtype == dtype
    assert results["last_state"].dtype == results["dA"].dtype == torch.float32
    assert_kernel_as_good_as_torch(inputs)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kind, dtype",
    [
        ({}, torch.float32),
        ({}, torch.bfloat16),
        ({"channel_last": True}, torch.bfloat16),
        ({"is_complex": True}, torch.bfloat16),
    ],
)
def test_kernel_gradients_of_a_long_sequence(kind, dtype):
    inputs = make_inputs("cuda", batch=2, dim=48, d_state=16, groups=2, seqlen=4097, dtype=dtype, **kind)
    wide = {k: None if v is None else v.cuda() for k, v in to_float64(inputs).items()}
    exact = run(selective_scan_fn, wide)
    torch_results = run(selective_scan_fn, inputs)
    for name, found in run(selective_scan_fn, inputs, backend="triton").items():
        assert found.dtype == torch_results[name].dtype, name
        assert_close_as_reference(found, exact[name], torch_results[name])


@pytest.mark.gpu
def test_kernel_reaches_past_two_to_the_31_elements(short_stretches):
    stride = 2**30 + 64
    buffer = torch.zeros(2 * stride + 64, dtype=torch.bfloat16, device="cuda")
    near = make_inputs("cuda", batch=3, dim=4, seqlen=16, dtype=torch.bfloat16)
    far = dict(near, u=buffer.as_strided((3, 4, 16), (stride, 16, 1)).copy_(near["u"]))
    found, expected = (run(selective_scan_fn, inputs, backend="triton") for inputs in (far, near))
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.gpu
def test_kernel_runs_on_the_device_of_its_tensors():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    inputs = make_inputs("cuda:1", seqlen=20)
    exact = run(selective_scan_ref, to_float64(inputs))
    found = run(selective_scan_fn, inputs, backend="triton")
    assert_close_as_reference(found["du"], exact["du"], run(selective_scan_ref, inputs)["du"])
