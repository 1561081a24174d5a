"""A convolution's window in fewer bits: rounded once, never past its range, and nearly the same model."""

import dataclasses

import pytest
import torch

from mamba_cli.conv_window import RANGES, decode_window, encode_window_, static_scales, storage_dtype
from mamba_cli.errors import Mamba2Error
from mamba_cli.fused_step import FusedStep
from mamba_cli.state import conv_window
from mamba_kernels.backend import use_backend
from model_testing import BASE, VARIANTS, make, variant
from test_model import distance, ids_for

CONFIGS = {name: VARIANTS[name] for name in ("plain", "hybrid", "everything")}
CONFIGS["mamba1"] = variant(layer="Mamba1", headdim=1, dt_rank=4, rmsnorm=False)
HALF_A_STEP = {"bf16": 2.0**-8, "fp8": 2.0**-3.9, "int8": 1 / 127}


def windows(conv_format: str, peaks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    dtype = storage_dtype(conv_format, torch.float32)
    return conv_window(2, len(peaks), 4, dtype, torch.device("cpu")), static_scales(conv_format, peaks)


@pytest.mark.parametrize("conv_format", ["bf16", "fp8", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_decoded_encodes_to_the_same_bytes(conv_format, dtype):
    peaks = torch.logspace(-3, 2, 96)
    codes, scales = windows(conv_format, peaks)
    values = (torch.rand(2, 96, 4, generator=torch.Generator().manual_seed(0)) * 2 - 1) * peaks[:, None]
    encode_window_(codes, values, scales)
    before, decoded = codes.clone(), decode_window(codes, scales, dtype)
    assert decoded.dtype == dtype and decoded.stride() == codes.stride()
    encode_window_(codes, decoded, scales)
    assert torch.equal(codes, before)
    assert ((decoded.float() - values).abs() <= HALF_A_STEP[conv_format] * peaks[:, None]).all()


@pytest.mark.parametrize("conv_format", RANGES)
def test_what_passes_the_range_is_the_largest_number(conv_format):
    codes, scales = windows(conv_format, torch.tensor([2.0, 0.0]))
    encode_window_(codes, torch.full((2, 2, 4), 1e30), scales)
    assert torch.equal(
        decode_window(codes, scales, torch.float32)[:, 0], torch.full((2, 4), 2.0) * RANGES[conv_format][1]
    )
    encode_window_(codes, torch.full((2, 2, 4), -1e30), scales)
    assert decode_window(codes, scales, torch.float32).isfinite().all()


def kept_in(lm, conv_format: str):
    """The model with fp32 SSM states, its windows in conv_format, for inputs up to what these models give."""
    state_format = dataclasses.replace(
        lm.with_state("fp32:1").state_format, conv=conv_format, name=conv_format
    )
    peaks = [
        None if layer is None else torch.full((lm.config.conv_dim,), 4.0) for layer in state_format.layers
    ]
    return lm.with_state(state_format, conv_peaks=peaks)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize(("conv_format", "near"), [("bf16", 5e-3), ("fp8", 0.1), ("int8", 0.05)])
def test_a_model_of_narrow_windows_is_nearly_the_model(config, conv_format, near):
    lm, ids = make(config), ids_for(config, length=20)
    narrow = kept_in(lm, conv_format)
    _, state = narrow.prefill(ids[:, :6])
    assert state.nbytes < lm.with_state("fp32:1").init_state(2).nbytes or config.attn_layer_idx
    _, state = narrow.prefill(ids[:, 6:8], state)
    steps = torch.stack([narrow.step_(ids[:, t], state) for t in range(8, 20)], 1)
    assert 0 < distance(steps, lm(ids)[:, 8:]) < near


def test_the_fused_step_reads_narrow_windows():
    lm, ids = kept_in(make(BASE), "int8"), ids_for(BASE, length=12)
    _, state = lm.prefill(ids[:, :5])
    fused, fused_state = FusedStep(lm.model, 2), state.clone()
    for t in range(5, 12):
        logits = lm.step_(ids[:, t], state)
        with use_backend("torch"), torch.inference_mode():
            assert distance(fused(ids[:, t], fused_state), logits) < 1e-4


def test_windows_in_8_bits_need_a_calibration():
    lm = make(BASE)
    state_format = dataclasses.replace(lm.with_state("int8").state_format, conv="fp8")
    with pytest.raises(Mamba2Error, match="expected calibrated scales of the convolution"):
        lm.with_state(state_format)
