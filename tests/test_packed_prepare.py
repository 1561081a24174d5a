"""The preparation of a step on a packed state is the same at the end of the convolution and on its own."""

import dataclasses
from dataclasses import dataclass

import pytest
import torch

from decode_testing import EPS, HALF_TYPES, randn, random_normed, whole
from mamba_cli.fused_step import FusedStep
from mamba_cli.load import random_model
from mamba_kernels.backend import use_backend
from mamba_kernels.decode_layer import MANY_ROWS, in_proj_step
from mamba_kernels.decode_norm import NormBuffers, normalise
from mamba_kernels.packed_ssm_step import Preparation, packed_ssm_step
from mamba_kernels.packed_state import LayerFormat, advance_positions, empty_packed_state
from model_testing import VARIANTS
from test_model import distance, ids_for


@dataclass(frozen=True)
class Layer:
    heads: tuple[str, ...]
    window: int = 8
    batch: int = 2
    headdim: int = 8
    d_state: int = 16
    ngroups: int = 1
    d_conv: int = 4
    bias: bool = True
    slots: tuple[int, ...] | None = None
    columns: bool = False

    @property
    def d_ssm(self):
        return len(self.heads) * self.headdim

    @property
    def rows(self):
        return 2 * self.d_ssm + 2 * self.ngroups * self.d_state + len(self.heads)

    def indices(self, device):
        return None if self.slots is None else torch.tensor(self.slots, dtype=torch.int32, device=device)

    def state(self, dtype, device):
        """A packed state amid its window, whose sequences have different lengths."""
        nheads, slots = len(self.heads), 5 if self.slots else self.batch
        columns = randn(nheads, self.d_state, seed=9).abs().float().to(device) + 0.5 if self.columns else None
        packed = empty_packed_state(
            LayerFormat(self.heads, window=self.window, seed=7), slots, nheads, self.headdim, self.d_state,
            self.ngroups, dtype, device, columns,
        )  # fmt: skip
        packed.position.copy_(torch.arange(slots) + 11)
        packed.x.copy_(randn(*packed.x.shape, seed=1))
        packed.B.copy_(randn(*packed.B.shape, seed=2))
        packed.dt.copy_(randn(*packed.dt.shape, seed=3).abs())
        return packed

    def convolution(self, dtype, device):
        """conv_state, with the channels adjacent in memory as a model has it, conv_weight and conv_bias."""
        slots, conv_dim = 5 if self.slots else self.batch, self.d_ssm + 2 * self.ngroups * self.d_state
        state = randn(slots, self.d_conv, conv_dim, seed=4).to(device, dtype).transpose(1, 2)
        weight = randn(conv_dim, self.d_conv, seed=5).to(device, dtype)
        return state, weight, randn(conv_dim, seed=6).to(device, dtype) if self.bias else None

    def parameters(self, device):
        names = ("dt_bias", "A_log")
        return {name: randn(len(self.heads), seed=7 + i).float().to(device) for i, name in enumerate(names)}


EVERY_FORMAT = ("int8", "int4", "fp8", "fp16", "bf16", "fp32")
LAYERS = [
    Layer(("int8",), batch=1, headdim=5),
    # More rows and channels than a tile has.
    Layer(("int8",) * 4, batch=5, headdim=66, d_conv=3, bias=False, window=1),
    Layer(("int4", "fp16"), d_state=33, ngroups=2, batch=3, slots=(1, -1, 4), d_conv=2, window=3),
    Layer(EVERY_FORMAT, d_state=128, ngroups=2, batch=3, slots=(-1, 3, 0)),
    Layer(EVERY_FORMAT, d_state=192, ngroups=3, batch=1, window=2),
    Layer(("int8", "fp16"), d_state=128, columns=True),
]


@pytest.mark.parametrize("dtype", [torch.float32, *HALF_TYPES])
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_one_launch_writes_what_two_write(device, layer, dtype):
    from mamba_kernels.decode_conv_triton import Convolution, launch_convolve
    from mamba_kernels.packed_convolution_triton import launch_convolve_and_prepare
    from mamba_kernels.packed_prepare_triton import common_of, launch_prepare

    written = []
    for together in (False, True):
        row = randn(layer.batch, layer.rows + 3, seed=10).to(device, dtype)[:, : layer.rows]
        packed, slots = layer.state(dtype, device), layer.indices(device)
        conv = Convolution(*layer.convolution(dtype, device), slots, layer.d_ssm)
        given = Preparation(packed, **layer.parameters(device), dt_limit=(0.1, 2.0))
        common = common_of(packed)
        for tensor in common:
            tensor.fill_(99)
        before = [tensor.clone() for tensor in (row, conv.state, packed.B, packed.dt, *common)]
        if together:
            launch_convolve_and_prepare(row, conv, given, pdl=False)
        else:
            launch_convolve(row, conv, pdl=False)
            launch_prepare(row, given, slots, pdl=False)
        after = {"row": row, "conv_state": conv.state, "B": packed.B, "dt": packed.dt, **common._asdict()}
        assert not any(torch.equal(*pair) for pair in zip(before[:5], list(after.values())[:5], strict=True))
        written.append(after)
    for name, expected in written[0].items():
        if name == "weights" and device.type == "cuda":  # there the order of their sums is the compiler's
            torch.testing.assert_close(written[1][name], expected, rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(written[1][name], expected), name


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("product", ["library's", "ours"])
def test_a_step_that_in_proj_has_prepared_is_the_step(device, nan_filled_empty, product, backend):
    layer = Layer(("int8", "fp16", "int4", "fp8"), window=2, d_state=32, ngroups=2, batch=3, slots=(1, -1, 4))
    d_model, dtype, outputs, states = 24, torch.float32, [], []
    weight = randn(layer.rows, d_model, seed=11).to(device, dtype) / d_model**0.5
    for prepared in (False, True):
        packed, slots = layer.state(dtype, device), layer.indices(device)
        conv_state, conv_weight, conv_bias = layer.convolution(dtype, device)
        parameters, D = layer.parameters(device), randn(len(layer.heads), seed=12).to(device, dtype)
        prepare = Preparation(packed, **parameters) if prepared else None
        row = torch.empty(layer.batch, layer.rows, dtype=dtype, device=device)
        for token in range(3):
            make = whole if product == "library's" else lambda *args, seed: random_normed(*args, 1, seed)
            normed = make(layer.batch, d_model, seed=20 + token)
            squares = None if normed.squares is None else normed.squares.float().to(device)
            normed = normed._replace(scaled=normed.scaled.to(device, dtype), squares=squares)
            out = NormBuffers.empty(layer.batch, layer.d_ssm, dtype, device)
            with use_backend(backend):
                in_proj_step(
                    normed, weight, None, conv_state, conv_weight, conv_bias, row, d_ssm=layer.d_ssm,
                    state_batch_indices=slots, prepare=prepare,
                )  # fmt: skip
                gated = packed_ssm_step(
                    row, packed, **parameters, D=D, norm_weight=D.repeat_interleave(layer.headdim), eps=EPS,
                    out=out, ngroups=layer.ngroups, state_batch_indices=slots, prepared=prepared,
                )  # fmt: skip
            outputs.append(normalise(gated))
            advance_positions([packed], slots)
        states.append(packed)
    assert torch.stack(outputs).isfinite().all()
    assert all(map(torch.equal, outputs[:3], outputs[3:]))
    assert all(map(torch.equal, states[0].tensors(), states[1].tensors()))


@pytest.mark.parametrize("words", ["int8:2", "fp16:1"])
def test_the_fused_step_of_many_rows_is_the_general_step_on_a_packed_state(words, device, nan_filled_empty):
    config = dataclasses.replace(VARIANTS["groups_as_heads"], n_layer=1)
    lm = random_model(config, device=device.type, backend="torch").with_state(words)
    ids = ids_for(config, MANY_ROWS, length=8).to(device)
    _, state = lm.prefill(ids[:, :5])
    fused, fused_state = FusedStep(lm.model, MANY_ROWS), state.clone()
    for t in range(5, 8):
        logits = lm.step_(ids[:, t], state)
        with use_backend("triton"), torch.inference_mode():
            assert distance(fused(ids[:, t], fused_state), logits) < 1e-4


def test_a_preparation_of_another_layer_is_refused(device):
    layer = Layer(("int8",) * 2)
    conv_state, conv_weight, conv_bias = layer.convolution(torch.float32, device)
    weight, row = torch.zeros(layer.rows, 24, device=device), torch.zeros(2, layer.rows, device=device)
    normed = whole(2, 24, seed=1)._replace(scaled=torch.zeros(2, 24, device=device))
    for other, message in [
        (Layer(("int8",) * 3), "d_ssm: expected 24, as the state's, got 16"),
        (Layer(("int8",) * 2, d_state=17), "conv_state: expected 50 channels, of x, B and C, got 48"),
        (Layer(("int8",), headdim=16), "out: expected shape"),
        (Layer(("int8",) * 2, batch=1), "packed: expected at least 2 slots, got 1"),
    ]:
        given = Preparation(other.state(torch.float32, device), **other.parameters(device))
        with pytest.raises(ValueError, match=message):
            in_proj_step(
                normed, weight, None, conv_state, conv_weight, conv_bias, row, d_ssm=layer.d_ssm,
                prepare=given,
            )  # fmt: skip
