"""What transformers loads, computes and saves."""

import pytest
import torch
from transformers import (
    FalconMambaConfig,
    FalconMambaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

from checkpoint_testing import save_state_spaces
from convert_testing import HELD_BY_ALL, distance, message
from mamba_cli.checkpoint import open_checkpoint
from mamba_cli.convert import convert
from mamba_cli.load import load_model
from mamba_cli.storage import same_bits
from model_testing import DATA


def loaded(kind, folder):
    model, info = kind.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    assert not any(info.values()), info
    return model.eval()


@pytest.mark.parametrize("name", HELD_BY_ALL)
def test_transformers_loads_every_key_and_computes_the_same_logits(tmp_path, name):
    config = HELD_BY_ALL[name]
    source = save_state_spaces(tmp_path / "source", config)
    convert(source, tmp_path / "hf", "hf", max_shard_size="50KB")
    theirs = loaded(Mamba2ForCausalLM, tmp_path / "hf")
    assert tuple(theirs.config.time_step_limit) == config.dt_limit
    assert theirs.config.tie_word_embeddings == config.tie_embeddings
    ids = torch.randint(61, (2, 21), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = theirs(ids).logits
    ours = load_model(source, device="cpu", dtype="float32")(ids)
    assert distance(ours, expected) < 1e-5
    assert distance(load_model(tmp_path / "hf", device="cpu", dtype="float32")(ids), expected) < 1e-5


SIZES = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=16)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (Mamba2ForCausalLM, Mamba2Config(**SIZES, num_heads=4, head_dim=16, n_groups=2)),
        (
            Mamba2ForCausalLM,
            Mamba2Config(**SIZES, num_heads=4, head_dim=16, n_groups=1, tie_word_embeddings=True),
        ),
        (MambaForCausalLM, MambaConfig(**SIZES)),
        (MambaForCausalLM, MambaConfig(**SIZES, tie_word_embeddings=False, use_bias=True)),
        (FalconMambaForCausalLM, FalconMambaConfig(**SIZES)),
    ],
    ids=["mamba2", "mamba2_tied", "mamba", "mamba_untied", "falcon_mamba"],
)
def test_what_transformers_saves_opens_and_comes_back_exact(tmp_path, kind, config):
    torch.manual_seed(0)
    model = kind(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    opened = open_checkpoint(tmp_path / "theirs")
    assert opened.format == "hf"
    assert opened.config.tie_embeddings == config.tie_word_embeddings
    assert (opened.config.bcdt_norm_eps is not None) == (kind is FalconMambaForCausalLM)
    if kind is FalconMambaForCausalLM:
        assert "FalconMamba" in message(tmp_path / "theirs", tmp_path / "ours", "state-spaces")
        convert(tmp_path / "theirs", tmp_path / "back", "hf", max_shard_size="1GB")
    else:
        convert(tmp_path / "theirs", tmp_path / "ours", "state-spaces")
        convert(tmp_path / "ours", tmp_path / "back", "hf")
    ids = torch.randint(64, (2, 21), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = model.eval()(ids).logits
    assert distance(load_model(tmp_path / "theirs", device="cpu", dtype="float32")(ids), expected) < 1e-5
    again = loaded(kind, tmp_path / "back").state_dict()
    assert all(same_bits(again[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("name", ["default", "untied"])
def test_verify_compares_logits(tmp_path, name):
    result = convert(DATA / "golden" / name, tmp_path / "hf", "hf", verify=True)
    assert result.logits_difference == 0
    rounded = convert(tmp_path / "hf", tmp_path / "bf16", "fla", dtype="bfloat16", verify=True)
    assert 0 < rounded.logits_difference < 0.1
