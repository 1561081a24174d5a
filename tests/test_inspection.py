"""The facts of a checkpoint: counts, bytes, half-lives, tokenizer, and what makes its values unsound."""

import dataclasses
import json
import math
import weakref
from pathlib import Path

import pytest
import torch

from mamba_cli.checkpoint import open_checkpoint
from mamba_cli.config import ModelConfig
from mamba_cli.inspection import (
    count_parameters,
    half_lives,
    inspect_checkpoint,
    state_bytes,
    tokenizer_facts,
)
from mamba_cli.load import load_model, random_model
from mamba_cli.quantize.saved import write_quantized
from mamba_cli.shapes import published_config
from mamba_cli.soundness import BLOCK, check_checkpoint, check_config, check_values
from mamba_cli.state import AttentionState, init_state
from mamba_cli.tokenizer import DEFAULT_TOKENIZER
from mamba_cli.weights import random_tensors
from mamba_kernels.packed_state import STATE_DTYPES
from model_testing import BASE, DATA, VARIANTS
from quantize_testing import save, some_format, some_scales

CODESTRAL = dataclasses.replace(
    published_config("2.7b"), d_model=4096, d_inner=8192, d_ssm=8192, ngroups=8, vocab_size=32768,
    vocab_rows=32768, tie_embeddings=False,
)  # fmt: skip


def tokens_until_half(A_log: float, dt_bias: float, low: float, high: float) -> int:
    """Decay a state of 1 token by token until half of it or less is left."""
    dt = min(max(math.log1p(math.exp(dt_bias)), low), high)
    state, tokens = 1.0, 0
    while state > 0.5:
        state *= math.exp(dt * -math.exp(A_log))
        tokens += 1
    return tokens


@pytest.mark.parametrize("limits", [(0.0, math.inf), (0.01, 0.05)])
def test_half_life_is_when_an_iterated_decay_halves(limits):
    A_log = torch.tensor([0.0, math.log(16), -3.0, 1.0])
    dt_bias = torch.tensor([-4.0, 0.5, -6.0, 3.0])
    lives = half_lives(A_log, dt_bias, limits)
    for life, a, bias in zip(lives.tolist(), A_log.tolist(), dt_bias.tolist(), strict=True):
        assert math.ceil(life) == tokens_until_half(a, bias, *limits)


def test_half_lives_of_mamba1_have_one_dt_a_channel_and_one_A_a_state():
    A_log, dt_bias = torch.randn(5, 3), torch.randn(5) - 4
    lives = half_lives(A_log, dt_bias, (0.0, math.inf))
    assert lives.shape == (5, 3)
    for channel in range(5):
        for n in range(3):
            expected = tokens_until_half(A_log[channel, n].item(), dt_bias[channel].item(), 0.0, math.inf)
            assert math.ceil(lives[channel, n].item()) == expected


def test_nothing_decays_where_dt_is_limited_to_zero():
    assert half_lives(torch.zeros(2), torch.zeros(2), (0.0, 0.0)).tolist() == [math.inf, math.inf]


@pytest.mark.parametrize("name", VARIANTS)
def test_parameters_are_those_of_the_tensors(name: str):
    config = VARIANTS[name]
    counted = count_parameters(config)
    assert counted.total == sum(tensor.numel() for tensor in random_tensors(config).values())
    assert counted.total == sum(dataclasses.astuple(counted)[1:])
    assert counted.head == (0 if config.tie_embeddings else counted.embedding)


def test_parameters_of_codestral_are_those_published():
    assert count_parameters(CODESTRAL).total == 7_285_403_648


@pytest.mark.parametrize("name", VARIANTS)
def test_state_bytes_are_those_the_model_allocates(name: str):
    config = VARIANTS[name]
    state = init_state(config, 1, torch.float32, torch.device("cpu"))
    counted = state_bytes(config, "fp32", [])
    assert counted.ssm + counted.conv == state.nbytes
    kv = 0
    for layer in state.layers:
        if isinstance(layer, AttentionState):
            one = torch.zeros(1, config.attention.num_heads_kv, 1, config.attention.head_dim)
            kv += sum(half.nbytes for half in layer.append(one, one))
    assert counted.kv_per_token == kv


@pytest.mark.parametrize("dtype", STATE_DTYPES)
def test_bytes_of_a_quantized_state_are_those_the_model_allocates(dtype: str):
    lm = random_model(BASE, "cpu", "float32" if dtype == "fp32" else "bfloat16").with_state(dtype)
    state = lm.init_state(1)
    conv = sum(layer.conv.nbytes for layer in state.layers)
    counted = state_bytes(BASE, dtype, lm.half_lives())
    assert (counted.ssm, counted.conv) == (state.nbytes - conv, conv)


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("conv", ["auto", "int8"])
def test_bytes_of_a_saved_format_are_those_the_model_allocates(tmp_path: Path, outer: bool, conv: str):
    saved = some_format(conv=conv)
    write_quantized(open_checkpoint(save(tmp_path)), tmp_path / "out", saved, some_scales(outer=outer))
    state = load_model(tmp_path / "out", "cpu", "bfloat16").init_state(1)
    conv_bytes = sum(layer.conv.nbytes for layer in state.layers)
    *others, counted = inspect_checkpoint(open_checkpoint(tmp_path / "out"), "out").state
    assert (counted.dtype, counted.ssm, counted.conv) == ("int8:4", state.nbytes - conv_bytes, conv_bytes)
    assert counted.saved and not any(other.saved for other in others)


def test_layers_of_a_hybrid_model_have_half_lives_but_for_attention():
    inspection = inspect_checkpoint(open_checkpoint(str(DATA / "golden" / "hybrid")), "hybrid")
    assert [layer.kind for layer in inspection.layers] == ["Mamba2", "attention", "Mamba2"]
    assert [layer.half_life is None for layer in inspection.layers] == [False, True, False]
    assert inspection.family == "Mamba-2 with attention layers"


def test_stored_bytes_add_up_to_the_tensors():
    checkpoint = open_checkpoint(str(DATA / "golden" / "default"))
    inspection = inspect_checkpoint(checkpoint, "default")
    (stored,) = inspection.stored
    assert stored.dtype == "float32"
    assert stored.nbytes == 4 * stored.parameters == 4 * inspection.parameters.total
    assert inspection.padding == 112 - 97


@dataclasses.dataclass
class Opened:
    """What tokenizer_facts and check_checkpoint look at of a checkpoint."""

    folder: Path
    config: ModelConfig
    tensors: dict = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()


def test_a_model_without_tokenizer_is_told_which_one_such_models_use(tmp_path):
    facts = tokenizer_facts(Opened(tmp_path, published_config("130m")))
    assert facts.kind is None
    assert DEFAULT_TOKENIZER in facts.hint
    assert DEFAULT_TOKENIZER not in tokenizer_facts(Opened(tmp_path, BASE)).hint


def test_a_tokenizer_beside_the_weights_is_described(tmp_path):
    save_tokenizer(tmp_path, 61)
    facts = tokenizer_facts(Opened(tmp_path, BASE))
    assert (facts.kind, facts.size, facts.eos_id, facts.problem) == ("tokenizer.json", 61, 0, None)


def test_a_tokenizer_with_ids_the_model_lacks_is_a_broken_config(tmp_path):
    save_tokenizer(tmp_path, 80)
    (finding,) = check_config(BASE, tokenizer_facts(Opened(tmp_path, BASE)))
    assert finding.broken
    assert finding.subject == "tokenizer"
    assert "61" in finding.detail
    assert "79" in finding.detail


def test_special_ids_that_are_no_token_are_found(tmp_path):
    config = dataclasses.replace(BASE, bos_token_id=62, eos_token_id=64, pad_token_id=60)
    found = {
        finding.subject: finding
        for finding in check_config(config, tokenizer_facts(Opened(tmp_path, config)))
    }
    assert set(found) == {"bos_token_id", "eos_token_id"}
    assert not found["bos_token_id"].broken  # a padding row: it exists, but no text has it
    assert found["eos_token_id"].broken


def test_an_end_of_text_other_than_the_tokenizers_is_suspicious(tmp_path):
    save_tokenizer(tmp_path, 61)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    config = dataclasses.replace(BASE, eos_token_id=5)
    (finding,) = check_config(config, tokenizer_facts(Opened(tmp_path, config)))
    assert (finding.broken, finding.subject) == (False, "eos_token_id")


def save_tokenizer(folder: Path, size: int) -> None:
    vocab = {"<|endoftext|>": 0} | {f"w{index}": index for index in range(1, size)}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "<|endoftext|>"}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_one_nan_and_one_infinity_are_found_and_placed(dtype):
    tensor = torch.randn(BLOCK // 1024 + 3, 1024).to(dtype)
    assert check_values("w.weight", tensor) == []
    tensor[-1, 7] = math.nan
    tensor[2, 5] = -math.inf
    found = {finding.check: finding for finding in check_values("w.weight", tensor)}
    assert set(found) == {"nan", "inf"}
    assert all(finding.broken for finding in found.values())
    assert f"1 of {tensor.numel()}" in found["nan"].detail
    assert f"[{BLOCK // 1024 + 2}, 7]" in found["nan"].detail
    assert "[2, 5]" in found["inf"].detail


@pytest.mark.parametrize(
    ("name", "tensor", "check", "broken"),
    [
        ("mixer.out_proj.weight", torch.zeros(4, 4), "zero", True),
        ("norm.weight", torch.zeros(4), "zero", True),
        ("mixer.conv1d.bias", torch.zeros(4), "zero", False),
        ("mixer.A_log", torch.zeros(4), "zero", False),
        ("mixer.in_proj.weight", torch.full((4, 4), 0.5), "constant", True),
        ("norm.weight", torch.ones(4), "constant", False),
        ("mixer.dt_bias", torch.full((4,), -2.0), "constant", False),
    ],
)
def test_zero_and_constant_tensors_are_broken_only_where_a_model_cannot_work(name, tensor, check, broken):
    (finding,) = check_values(name, tensor)
    assert (finding.check, finding.broken, finding.subject) == (check, broken, name)


def test_a_single_value_is_no_constant_tensor():
    assert check_values("mixer.dt_bias", torch.tensor([-2.0])) == []


def test_check_holds_one_tensor_at_a_time(tmp_path):
    alive: list[weakref.ref] = []

    class Stored:
        nbytes = 4096

        def load(self) -> torch.Tensor:
            assert all(earlier() is None for earlier in alive)
            tensor = torch.randn(32, 32)
            alive.append(weakref.ref(tensor))
            return tensor

    read: list[int] = []
    opened = Opened(tmp_path, BASE, {f"{index}.weight": Stored() for index in range(5)})
    soundness = check_checkpoint(opened, read.append)
    assert (len(alive), soundness.tensors, soundness.nbytes) == (5, 5, 5 * 4096)
    assert (sum(read), soundness.broken, soundness.findings) == (5 * 4096, 0, ())
