"""A model of packed SSM states is the model: exactly in fp32, nearly in less, wherever prefill ends."""

import dataclasses
import io
import json

import pytest
import torch

from mamba_cli.decoding import decode
from mamba_cli.fused_step import FusedStep
from mamba_cli.fused_step_mamba1 import FusedStepMamba1
from mamba_cli.load import load_model, random_model
from mamba_cli.sampling import SamplingParams, UniformNumbers
from mamba_cli.state import AttentionState
from mamba_cli.step_graph import step_function
from mamba_commands.app import main
from mamba_kernels.backend import use_backend
from mamba_kernels.decode_layer import MANY_ROWS
from model_testing import BASE, VARIANTS, make, variant
from test_model import distance, ids_for

MAMBA1 = variant(layer="Mamba1", headdim=1, ngroups=1, dt_rank=4, rmsnorm=False)
CONFIGS = {**VARIANTS, "mamba1": MAMBA1, "falcon_mamba": dataclasses.replace(MAMBA1, bcdt_norm_eps=1e-6)}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
# What one rounding of a row may cost the logits of these small random models.
NEAR = {"bf16:8": 2e-3, "fp16": 1e-3, "int8": 5e-3, "fp8": 2e-2, "int4": 8e-2}


def run(lm, ids: torch.Tensor, prompt: int) -> torch.Tensor:
    """Prefill the first `prompt` tokens, step through the others; return the logits after each of those."""
    state = lm.prefill(ids[:, :prompt])[1] if prompt else lm.init_state(len(ids))
    return torch.stack([lm.step_(ids[:, t], state) for t in range(prompt, ids.shape[1])], 1)


@every_config
@pytest.mark.parametrize(("window", "prompt"), [(1, 0), (3, 5), (8, 18)])
def test_a_packed_fp32_state_is_the_plain_one(config, window, prompt):
    lm, ids = make(config), ids_for(config, length=30)
    packed = lm.with_state(f"fp32:{window}")
    assert distance(run(packed, ids, prompt), lm(ids)[:, prompt:]) < 1e-5


@every_config
def test_a_prompt_in_two_parts_around_steps_is_one_prompt(config):
    lm, ids = make(config), ids_for(config, length=30)
    packed = lm.with_state("fp32:4")
    _, state = packed.prefill(ids[:, :7])
    for t in range(7, 13):  # into the middle of a window
        packed.step_(ids[:, t], state)
    kept = state.clone()
    logits, state = packed.prefill(ids[:, 13:21], state)
    assert distance(logits, lm(ids)[:, 20]) < 1e-5
    assert distance(packed.step(ids[:, 21], state)[0], lm(ids)[:, 21]) < 1e-5
    # The state that was passed in is left as it was, its window too.
    assert distance(packed.step(ids[:, 13], kept)[0], lm(ids)[:, 13]) < 1e-5


@pytest.mark.parametrize(
    ("name", "words"), [("plain", words) for words in NEAR] + [(name, "int8") for name in CONFIGS]
)
def test_a_narrow_state_is_near_the_plain_one(name, words):
    lm, ids = make(CONFIGS[name]), ids_for(CONFIGS[name], length=40)
    logits = run(lm.with_state(words), ids, 11)
    assert logits.isfinite().all()
    assert 0 < distance(logits, lm(ids)[:, 11:]) < NEAR[words]


SERVED = [name for name, config in VARIANTS.items() if FusedStep.serves(config)]


@pytest.mark.parametrize(
    ("name", "backend"), [(name, "torch") for name in SERVED] + [("groups_as_heads", "triton")]
)
def test_the_fused_step_is_the_general_step_on_a_packed_state(name, backend, device):
    config = dataclasses.replace(VARIANTS[name], n_layer=1)
    lm = random_model(config, device=device.type, backend="torch").with_state("int8")
    ids = ids_for(config, length=24).to(device)
    _, state = lm.prefill(ids[:, :5])
    fused, fused_state = FusedStep(lm.model, 2), state.clone()
    for t in range(5, 24 if backend == "torch" else 9):
        logits = lm.step_(ids[:, t], state)
        with use_backend(backend), torch.inference_mode():
            assert distance(fused(ids[:, t], fused_state), logits) < 1e-4


@pytest.mark.parametrize("name", ["mamba1", "falcon_mamba"])
@pytest.mark.parametrize("batch", [2, MANY_ROWS])
@pytest.mark.parametrize(("dtype", "near"), [("float32", 1e-4), ("bfloat16", 2e-2)])
def test_the_fused_step_of_mamba1_is_the_general_step_on_a_packed_state(name, batch, dtype, near, device):
    config = dataclasses.replace(CONFIGS[name], n_layer=1)
    lm = random_model(config, device=device.type, dtype=dtype, backend="torch").with_state("int8:3")
    ids = ids_for(config, batch, length=12).to(device)
    _, state = lm.prefill(ids[:, :5])
    fused_state = state.clone()
    fused = step_function(lm.model, fused_state)
    assert isinstance(fused, FusedStepMamba1)
    for t in range(5, 12):
        logits = lm.step_(ids[:, t], state)
        with use_backend("torch"), torch.inference_mode():
            assert distance(fused(ids[:, t], fused_state), logits) < near
    assert fused_state.packed[0].position.tolist() == [12] * batch


@pytest.mark.parametrize("name", ["everything", "no_gated_norm"])
def test_kernels_and_torch_agree_on_a_packed_state(name, device):
    config = VARIANTS[name]
    ids = ids_for(config, length=14)
    one, other = (
        run(random_model(config, device=device.type, backend=backend).with_state("int8:4"), ids, 7)
        for backend in ("triton", "torch")
    )
    assert distance(one, other) < 1e-4


@pytest.mark.parametrize("name", ["plain", "hybrid", "mamba1"])
@pytest.mark.parametrize("words", ["int8", "fp8:nearest:1", "int4"])
def test_a_row_alone_is_the_row_in_a_batch(name, words):
    config = CONFIGS[name]
    lm, ids = make(config, "float64").with_state(words), ids_for(config, batch=3, length=30)
    together = run(lm, ids, 9)
    for row in range(3):
        assert distance(run(lm, ids[row : row + 1], 9), together[row : row + 1]) < 1e-6


@pytest.mark.parametrize("name", ["plain", "hybrid", "mamba1"])
def test_copies_of_a_packed_state_go_their_own_ways(name):
    config = CONFIGS[name]
    lm, ids = make(config).with_state("int8:4"), ids_for(config, batch=1, length=20)
    _, state = lm.prefill(ids[:, :10])
    for t in range(10, 13):
        lm.step_(ids[:, t], state)
    before = state.clone()
    logits, _ = lm.step(torch.tensor([5, 9, 5]), state.repeat(3))
    assert torch.equal(logits[0], logits[2]) and not torch.equal(logits[0], logits[1])
    assert distance(logits[1:2], lm.step(torch.tensor([9]), state)[0]) < 1e-5
    # What a captured step relies on: copy_ gives back all of the memory.
    lm.step_(torch.tensor([3]), state)
    with torch.inference_mode():
        state.copy_(before)
    assert state.seqlen == before.seqlen == 13
    for mine, theirs in zip(state.packed, before.packed, strict=True):
        assert all(map(torch.equal, mine.tensors(), theirs.tensors()))
    assert distance(lm.step(torch.tensor([5]), state)[0], logits[:1]) < 1e-5


@pytest.mark.parametrize("words", ["fp32", "bf16", "fp16", "int8", "fp8", "int4", "fp32:4"])
def test_bytes_are_those_of_the_storages(words):
    state = make(BASE).with_state(words).init_state(3)
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for layer in state.layers
        for tensor in layer.tensors()
    }
    assert state.nbytes == sum(storages.values())
    assert not any(isinstance(layer, AttentionState) for layer in state.layers)


def test_narrower_states_take_less_memory():
    lm = make(variant(d_state=128, headdim=64, d_inner=128, d_ssm=128), "bfloat16")
    sizes = [lm.with_state(f"{dtype}:uniform").init_state(1).nbytes for dtype in ("fp32", "int8", "int4")]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 2 * sizes[1]


def test_models_of_several_states_share_their_weights():
    lm = make(BASE)
    other = lm.with_state("int8")
    assert other.model is lm.model
    assert (lm.state_dtype, other.state_dtype, other.with_state("fp32").state_dtype) == (
        "fp32",
        "int8",
        "fp32",
    )
    assert lm.init_state(1).packed == [] and other.with_state("fp32").init_state(1).packed == []
    assert len(other.init_state(1).packed) == BASE.n_layer


def test_the_same_seed_gives_the_same_bytes():
    lm, ids = make(BASE).with_state("int4"), ids_for(BASE, length=30)
    assert torch.equal(run(lm, ids, 9), run(lm, ids, 9))


def test_greedy_text_from_an_int8_state():
    lm = load_model("demo", device="cpu", dtype="float32")
    packed = load_model("demo", device="cpu", dtype="float32", state_dtype="int8")
    greedy = SamplingParams(temperature=0)

    def text(lm) -> list[int]:
        ids = lm.tokenizer.encode("Once upon a time")
        logits, state = lm.prefill([ids])
        tokens = decode(lm, logits, state, greedy, lm.config.vocab_size, ids, UniformNumbers(0, 1))
        return [next(tokens)[0] for _ in range(24)]

    assert text(packed) == text(lm)


def test_generate_says_how_the_state_is_kept(capfd):
    arguments = ["generate", "-p", "One day", "-n", "4", "--device", "cpu", "--seed", "1", "--json", "-v"]
    assert main([*arguments, "--state-dtype", "int8:nearest:1"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["state_dtype"] == "int8:nearest:1"
    assert "state in int8:nearest:1" in err


@pytest.mark.parametrize("command", [["generate", "-p", "x"], ["eval-ppl", "-"], ["bench", "demo"]])
def test_a_state_dtype_that_is_none_is_wrong_usage(command, capfd, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert main([*command, "--state-dtype", "int9"]) == 2
    out, err = capfd.readouterr()
    assert out == "" and "--state-dtype: expected one of fp32, " in err and "got 'int9'" in err


def test_bench_measures_the_state_asked_for(capfd):
    arguments = ["bench", "demo", "--device", "cpu", "--prompt-lengths", "4", "--generate", "2", "--json"]
    assert main([*arguments, "--repetitions", "1", "--state-dtype", "int8"]) == 0
    assert json.loads(capfd.readouterr().out)["state_dtype"] == "int8"


def test_eval_ppl_compares_a_state_with_another_of_the_same_model(capfd, tmp_path):
    (tmp_path / "text.txt").write_text(STORY)
    arguments = ["eval-ppl", str(tmp_path / "text.txt"), "--device", "cpu", "--mode", "step", "--json"]
    assert main([*arguments, "--state-dtype", "int8", "--reference", "fp32"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert (found["state_dtype"], found["reference"]["state_dtype"]) == ("int8", "fp32")
    assert 0 < found["reference"]["nll_change"] < 0.05


def test_a_measurement_is_not_continued_with_another_state(capfd, tmp_path):
    (tmp_path / "text.txt").write_text(STORY)
    text, kept = str(tmp_path / "text.txt"), str(tmp_path / "kept")
    arguments = ["eval-ppl", text, "--device", "cpu", "--resume", kept]
    assert main([*arguments, "--state-dtype", "int8"]) == 0
    assert main([*arguments, "--state-dtype", "int8:nearest"]) == 1
    assert "expected the same measurement, model" in capfd.readouterr().err


STORY = "Once upon a time, there was a little girl named Lily. She liked to play outside in the park. " * 2
