"""The words of --state-dtype mean one format, and what they leave open follows from the heads' memory."""

import pytest
import torch

from mamba_cli.errors import Mamba2Error
from mamba_cli.state_format import LARGEST_WINDOW, StateSpec, parse_state_spec, recommended_format
from mamba_kernels.packed_state import STATE_DTYPES
from model_testing import BASE, VARIANTS, make, variant


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("int8", StateSpec("int8")),
        ("int8:nearest:1", StateSpec("int8", "nearest", 1)),
        ("fp16:stochastic", StateSpec("fp16", "stochastic")),
        ("int4:outer:16", StateSpec("int4", window=16, outer=True)),
        ("fp8:4:uniform:nearest", StateSpec("fp8", "nearest", 4, uniform=True)),
    ],
)
def test_words_in_any_order(text, spec):
    assert parse_state_spec(text) == spec
    assert parse_state_spec(str(spec)) == spec


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "expected one of fp32, .* got ''"),
        ("int3", "expected one of fp32, .* got 'int3'"),
        ("nearest:int8", "got 'nearest'"),
        ("int8:", "got ''"),
        ("int8:0", "got '0'"),
        (f"int8:{LARGEST_WINDOW + 1}", f"got '{LARGEST_WINDOW + 1}'"),
        ("int8:" + "9" * 5000, "a window from 1 to"),
        ("int8:-1", "got '-1'"),
        ("int8:²", "got '²'"),
        ("int8:4:8", "expected one window, got two"),
        ("int8:nearest:stochastic", "expected one rounding, got two"),
    ],
)
def test_other_words_are_refused(text, says):
    with pytest.raises(Mamba2Error, match=says):
        parse_state_spec(text)


def test_what_is_a_plain_tensor():
    assert parse_state_spec("fp32").plain == torch.float32
    assert parse_state_spec("bf16").plain == torch.bfloat16
    assert not any(parse_state_spec(text).plain for text in ("fp32:8", "bf16:stochastic", "fp16", "int8"))


@pytest.mark.parametrize("dtype", STATE_DTYPES)
def test_a_uniform_format_has_every_head_in_its_base_dtype_and_a_seed_for_each_layer(dtype):
    lives = [torch.full((BASE.nheads,), 1e6), None, torch.full((BASE.nheads,), 2.0)]
    found = recommended_format(BASE, lives, parse_state_spec(f"{dtype}:nearest:3:uniform"))
    first, attention, last = found.layers
    assert attention is None
    assert first.heads == last.heads == (dtype,) * BASE.nheads
    assert (first.rounding, first.window) == ("nearest", 3)
    assert first.seed != last.seed
    assert found.name == f"{dtype}:nearest:3:uniform"


def test_a_format_has_a_layer_for_each_of_the_model():
    lm = make(VARIANTS["hybrid"]).with_state("int8")
    assert [layer is None for layer in lm.state_format.layers] == [False, True, False]
    assert lm.state_dtype == "int8"


def test_column_scales_without_a_calibration_are_refused():
    with pytest.raises(Mamba2Error, match="int8:outer: expected calibrated column scales"):
        make(BASE).with_state("int8:outer")


def test_a_head_that_remembers_long_is_kept_in_more_bits():
    lives = torch.tensor([2.0, 5.0, 1e6, 1e9])
    (layer,) = recommended_format(BASE, [lives], parse_state_spec("int4")).layers
    assert layer.heads[:2] == ("int4", "int4") and "int4" not in layer.heads[2:]
    (uniform,) = recommended_format(BASE, [lives], parse_state_spec("int4:uniform")).layers
    assert uniform.heads == ("int4",) * 4


def test_the_channels_of_mamba1_are_one_head():
    config = variant(layer="Mamba1", headdim=1, dt_rank=4, rmsnorm=False)
    lm = make(config).with_state("int8")
    assert [len(layer.heads) for layer in lm.state_format.layers] == [1, 1]
