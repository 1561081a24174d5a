"""An opened checkpoint has every tensor that its configuration asks for, in its shape, and no other."""

import pytest
import torch

from checkpoint_testing import edit_json, save_state_spaces, state_dict
from mamba_cli.checkpoint import open_checkpoint
from mamba_cli.errors import Mamba2Error
from mamba_cli.schema import tensor_shapes
from mamba_cli.storage import same_bits
from model_testing import BASE, DATA, VARIANTS, golden_names, variant

HEAD, EMBEDDING = "lm_head.weight", "backbone.embedding.weight"
A_LOG = "backbone.layers.1.mixer.A_log"


def message(*arguments) -> str:
    with pytest.raises(Mamba2Error) as caught:
        open_checkpoint(*arguments)
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize("name", golden_names())
def test_checkpoints_of_mamba_ssm_open(name):
    checkpoint = open_checkpoint(DATA / "golden" / name)
    assert checkpoint.format == "state-spaces"
    assert (checkpoint.config.vocab_size, checkpoint.config.vocab_rows) == (97, 112)
    assert checkpoint.config.tie_embeddings == (name != "untied")
    original = torch.load(DATA / "golden" / name / "pytorch_model.bin", weights_only=True)
    assert original.keys() - checkpoint.tensors.keys() <= {HEAD}
    for key, tensor in checkpoint.tensors.items():
        assert same_bits(tensor.load(), original[key])


@pytest.mark.parametrize("bin", [True, False], ids=["bin", "safetensors"])
@pytest.mark.parametrize("name", sorted(VARIANTS.keys() - {"odd_heads"}))  # a fractional expand
def test_every_variant_opens_in_file_order(tmp_path, name, bin):
    config = VARIANTS[name]
    checkpoint = open_checkpoint(save_state_spaces(tmp_path, config, bin=bin))
    assert checkpoint.config == config
    assert list(checkpoint.tensors) == list(tensor_shapes(config))
    assert checkpoint.nbytes == sum(tensor.load().nbytes for tensor in checkpoint.tensors.values())


def test_missing_tensor_is_named_with_its_shape(tmp_path):
    tensors = state_dict(BASE)
    del tensors[A_LOG]
    said = message(save_state_spaces(tmp_path, BASE, tensors))
    assert f"{A_LOG}: expected shape (4,), got no such tensor" in said


def test_unknown_tensor_is_named(tmp_path):
    tensors = state_dict(BASE) | {"backbone.layers.0.mixer.b_norm.weight": torch.ones(16)}
    said = message(save_state_spaces(tmp_path, BASE, tensors))
    assert "backbone.layers.0.mixer.b_norm.weight: expected no such tensor, got shape (16,)" in said


def test_wrong_shape_is_named_with_both(tmp_path):
    folder = save_state_spaces(tmp_path, BASE)
    edit_json(folder / "config.json", ssm_cfg={"layer": "Mamba2", "headdim": 16, "d_state": 32})
    said = message(folder)
    assert "backbone.layers.0.mixer.in_proj.weight: expected shape (196, 32), got (164, 32)" in said
    assert "; and 3 more" in said


def test_vocabulary_that_contradicts_the_embedding_is_named_with_both(tmp_path):
    folder = save_state_spaces(tmp_path, BASE)
    edit_json(folder / "config.json", vocab_size=70)
    assert f"{EMBEDDING}: expected shape (72, 32), got (64, 32)" in message(folder)


def test_integers_are_no_weights(tmp_path):
    tensors = state_dict(BASE) | {A_LOG: torch.ones(4, dtype=torch.int8)}
    assert "torch.int8" in message(save_state_spaces(tmp_path, BASE, tensors))


@pytest.mark.parametrize("layers", [1, 3, 10**12])
def test_number_of_layers_is_not_believed(tmp_path, layers):
    folder = save_state_spaces(tmp_path, BASE)
    edit_json(folder / "config.json", n_layer=layers)
    assert f"expected {layers}" in message(folder)


@pytest.mark.parametrize("bin", [True, False], ids=["bin", "safetensors"])
@pytest.mark.parametrize("head", ["absent", "shared", "copy"])
def test_tied_head_is_the_embedding_present_or_not(tmp_path, head, bin):
    tensors = state_dict(BASE)
    tensors[EMBEDDING][3, 4] = float("nan")  # equal is to the bit
    if head == "absent":
        del tensors[HEAD]
    if head == "copy":
        tensors[HEAD] = tensors[EMBEDDING].clone()
    checkpoint = open_checkpoint(save_state_spaces(tmp_path, BASE, tensors, bin))
    assert checkpoint.config.tie_embeddings
    assert HEAD not in checkpoint.tensors
    assert checkpoint.notes == ()


@pytest.mark.parametrize("tied", [True, False])
def test_head_that_differs_is_kept_whatever_the_configuration_says(tmp_path, tied):
    tensors = state_dict(BASE)
    tensors[HEAD] = tensors[EMBEDDING] + 1
    checkpoint = open_checkpoint(save_state_spaces(tmp_path, variant(tie_embeddings=tied), tensors))
    assert not checkpoint.config.tie_embeddings
    assert same_bits(checkpoint.tensors[HEAD].load(), tensors[HEAD])
    assert len(checkpoint.notes) == tied


def test_untied_configuration_without_a_head_is_refused(tmp_path):
    tensors = state_dict(BASE)
    del tensors[HEAD]
    assert HEAD in message(save_state_spaces(tmp_path, variant(tie_embeddings=False), tensors))


def test_head_of_another_shape_is_refused(tmp_path):
    tensors = state_dict(BASE) | {HEAD: torch.ones(61, 32)}
    said = message(save_state_spaces(tmp_path, BASE, tensors))
    assert "(64, 32)" in said and "(61, 32)" in said


@pytest.mark.parametrize("lost", ["config.json", "pytorch_model.bin"])
def test_missing_file_is_named(tmp_path, lost):
    folder = save_state_spaces(tmp_path, BASE)
    (folder / lost).unlink()
    assert lost in message(folder)


def test_missing_folder_and_a_file_are_refused(tmp_path):
    assert "no such folder" in message(str(tmp_path / "nowhere"))
    (tmp_path / "file").write_text("x")
    assert "a file" in message(str(tmp_path / "file"))
    save_state_spaces(tmp_path, BASE)
    assert "revision" in message(str(tmp_path), "main")


def test_configuration_linked_from_outside_is_not_read(tmp_path):
    folder = save_state_spaces(tmp_path / "model", BASE)
    (folder / "config.json").rename(tmp_path / "config.json")
    (folder / "config.json").symlink_to(tmp_path / "config.json")
    assert "inside the folder" in message(folder)
