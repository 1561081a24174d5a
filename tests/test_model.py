"""Every path of the model gives the oracle's numbers: whole, split, token by token, in a batch."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from mamba_cli.errors import Mamba2Error
from mamba_cli.language_model import _resolve_backend
from mamba_cli.load import load_model
from mamba_cli.weights import random_tensors
from model_testing import DATA, VARIANTS, golden_names, make, variant
from oracle import oracle_logits

every_variant = pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())


def ids_for(config, batch: int = 2, length: int = 37) -> torch.Tensor:
    return torch.randint(config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(1))


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def assert_states_agree(a, b, tolerance: float) -> None:
    assert a.seqlen == b.seqlen
    for mine, other in zip(a.layers, b.layers, strict=True):
        if hasattr(mine, "kv"):
            assert mine.length == other.length
            assert distance(mine.kv[..., : mine.length, :], other.kv[..., : mine.length, :]) < tolerance
        else:
            assert distance(mine.ssm, other.ssm) < tolerance
            assert distance(mine.conv, other.conv) < tolerance


@pytest.mark.parametrize("name", golden_names())
def test_golden_logits_of_mamba_ssm(name):
    lm = load_model(DATA / "golden" / name, device="cpu", dtype="float32")
    expected = load_file(DATA / "golden" / name / "expect.safetensors")
    assert distance(lm(expected["input_ids"]), expected["logits"]) < 1e-5


def test_a_head_that_its_configuration_calls_tied_is_used_with_a_warning(tmp_path):
    folder = shutil.copytree(DATA / "golden" / "untied", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {"tie_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.warns(UserWarning, match=r"lm_head\.weight differs from the embedding"):
        lm = load_model(folder, device="cpu", dtype="float32")
    expected = load_file(folder / "expect.safetensors")
    assert distance(lm(expected["input_ids"]), expected["logits"]) < 1e-5


@every_variant
def test_whole_prefill_is_the_recurrence(config):
    ids = ids_for(config)
    lm = make(config, "float64")
    assert distance(lm(ids), oracle_logits(config, random_tensors(config), ids)) < 1e-12
    assert distance(make(config)(ids), lm(ids)) < 1e-5


@every_variant
@pytest.mark.parametrize("cut", [1, 2, 3, 4, 16, 36])
def test_prefill_in_two_parts_is_one_prefill(config, cut):
    lm, ids = make(config, "float64"), ids_for(config)
    whole, end = lm.prefill(ids)
    _, state = lm.prefill(ids[:, :cut])
    kept = state.clone()
    last, continued = lm.prefill(ids[:, cut:], state)
    assert distance(last, whole) < 1e-12
    assert_states_agree(continued, end, 1e-12)
    assert_states_agree(state, kept, 1e-300)  # the state passed in is left as it was


@every_variant
def test_token_by_token_is_one_prefill(config):
    lm, ids = make(config), ids_for(config)
    expected = lm(ids)
    state = lm.init_state(2)
    for t in range(ids.shape[1]):
        logits, state = lm.step(ids[:, t], state)
        assert distance(logits, expected[:, t]) < 1e-5
    assert_states_agree(state, lm.prefill(ids)[1], 1e-5)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_prompts_shorter_than_the_convolution(length):
    lm, ids = make(VARIANTS["plain"], "float64"), ids_for(VARIANTS["plain"])
    _, state = lm.prefill(ids[:, :length])
    expected = lm(ids)
    for t in range(length, length + 5):
        logits, state = lm.step(ids[:, t], state)
        assert distance(logits, expected[:, t]) < 1e-12


@pytest.mark.parametrize("config", [VARIANTS["plain"], VARIANTS["hybrid"]], ids=["plain", "hybrid"])
def test_a_row_alone_is_the_row_in_a_batch(config):
    lm, ids = make(config), ids_for(config, batch=3)
    together, state = lm.prefill(ids[:, :20])
    stepped, _ = lm.step(ids[:, 20], state)
    for row in range(3):
        alone, state_alone = lm.prefill(ids[row : row + 1, :20])
        assert distance(alone, together[row : row + 1]) < 1e-5
        assert distance(lm.step(ids[row : row + 1, 20], state_alone)[0], stepped[row : row + 1]) < 1e-5


def test_a_token_never_changes_what_came_before_it():
    config = VARIANTS["groups_between_one_and_nheads"]
    lm, ids = make(config), ids_for(config, batch=1, length=50)  # over three chunks of 16
    before = lm(ids)
    for t in (0, 8, 17, 33, 49):
        changed = ids.clone()
        changed[0, t] = (changed[0, t] + 1) % config.vocab_size
        after = lm(changed)
        assert torch.equal(after[:, :t], before[:, :t])
        assert not torch.equal(after[:, t], before[:, t])


def test_blocks_of_a_long_prompt_are_one_prefill(monkeypatch):
    lm, ids = make(VARIANTS["hybrid"], "float64"), ids_for(VARIANTS["hybrid"], length=50)
    whole, end = lm(ids), lm.prefill(ids)[1]
    monkeypatch.setattr("mamba_cli.language_model.BLOCK_TOKENS", {"cpu": 14})
    assert distance(lm(ids), whole) < 1e-12
    assert_states_agree(lm.prefill(ids)[1], end, 1e-12)


def test_repeated_states_go_their_own_ways():
    lm, ids = make(VARIANTS["hybrid"], "float64"), ids_for(VARIANTS["hybrid"], batch=1)
    _, state = lm.prefill(ids)
    logits, _ = lm.step(torch.tensor([5, 9, 5]), state.repeat(3))
    assert torch.allclose(logits[0], logits[2]) and not torch.allclose(logits[0], logits[1])
    assert distance(logits[1:2], lm.step(torch.tensor([9]), state)[0]) < 1e-12


@every_variant
def test_bf16_is_near_the_recurrence(config):
    ids = ids_for(config)
    expected = oracle_logits(config, random_tensors(config), ids)
    lm = make(config, "bfloat16")
    assert lm(ids).dtype == torch.bfloat16
    assert distance(lm(ids), expected) < 2e-2
    state = lm.init_state(2)
    steps = torch.stack([lm.step_(ids[:, t], state) for t in range(ids.shape[1])], 1)
    assert distance(steps, expected) < 2e-2


def test_kept_tensors_are_not_rounded_to_the_model_dtype():
    mixer = make(VARIANTS["plain"], "bfloat16").model.blocks[0].mixer
    expected = random_tensors(VARIANTS["plain"])
    assert torch.equal(mixer.dt_bias, expected["backbone.layers.0.mixer.dt_bias"])
    assert torch.equal(mixer.A, -expected["backbone.layers.0.mixer.A_log"].exp())
    assert torch.equal(mixer.D, expected["backbone.layers.0.mixer.D"])


def test_decoding_keeps_the_state_at_its_size():
    lm = make(VARIANTS["plain"])
    _, state = lm.prefill(ids_for(VARIANTS["plain"], batch=1))
    size = state.nbytes
    for _ in range(5):
        lm.step_(torch.tensor([3]), state)
    assert state.nbytes == size == lm.init_state(1).nbytes


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([[64]], r"expected ids in \[0, 64\), got 64"),
        ([[-1]], "got -1"),
        ([[]], "seqlen >= 1"),
        ([1, 2], "batch, seqlen"),
        ([[0.5]], "expected integers"),
    ],
)
def test_wrong_ids_are_refused(ids, says):
    with pytest.raises(Mamba2Error, match=says):
        make(variant()).prefill(ids)


def test_a_state_of_another_batch_is_refused():
    lm = make(variant())
    with pytest.raises(Mamba2Error, match="expected batch 2, got 1"):
        lm.prefill([[1], [2]], lm.init_state(1))


def test_a_float64_model_runs_in_torch_on_a_gpu_as_well():
    gpu = torch.device("cuda")
    assert _resolve_backend("auto", gpu, torch.float64) == "torch"
    assert _resolve_backend("auto", gpu, torch.float32) == "triton"
