"""A conversion is exact: every tensor, every field that a format can hold."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint_testing import edit_json, save_state_spaces, state_dict, strict_json
from convert_testing import EMBEDDING, HEAD, HELD_BY_ALL, assert_same_tensors, contents, message
from mamba_cli.checkpoint import open_checkpoint
from mamba_cli.convert import convert
from mamba_cli.storage import same_bits
from model_testing import BASE, variant


@pytest.mark.parametrize("name", HELD_BY_ALL)
def test_round_trip_through_every_format_is_exact(tmp_path, name):
    config = HELD_BY_ALL[name]
    tensors = state_dict(config)
    tensors[EMBEDDING][:3, 0] = torch.tensor([-0.0, float("nan"), 1e-42])
    first = save_state_spaces(tmp_path / "source", config, tensors)
    for number, to in enumerate(["hf", "fla", "hf", "state-spaces"]):
        convert(first if number == 0 else tmp_path / str(number - 1), tmp_path / str(number), to)
    assert open_checkpoint(tmp_path / "3").config == config
    written = torch.load(tmp_path / "3" / "pytorch_model.bin", weights_only=True)
    assert written.keys() == tensors.keys()
    assert all(same_bits(written[key], tensors[key]) for key in tensors)


@pytest.mark.parametrize("to", ["state-spaces", "hf", "fla"])
def test_within_a_format_a_conversion_is_a_copy(tmp_path, source, to):
    convert(source, tmp_path / "first", to)
    edit_json(tmp_path / "first" / "config.json", architectures=["Mine"])
    result = convert(tmp_path / "first", tmp_path / "second", to)
    assert result.copied
    assert contents(tmp_path / "first") == contents(tmp_path / "second")


def test_shards_and_their_index_are_copied_too(tmp_path, source):
    convert(source, tmp_path / "first", "hf", max_shard_size="10KB")
    files = contents(tmp_path / "first")
    assert "model.safetensors.index.json" in files and len(files) > 3
    convert(tmp_path / "first", tmp_path / "second", "hf")
    assert contents(tmp_path / "second") == files
    convert(tmp_path / "first", tmp_path / "third", "hf", max_shard_size="5GB")
    assert contents(tmp_path / "third").keys() == {"config.json", "model.safetensors"}
    assert_same_tensors(source, tmp_path / "third")


def test_infinity_that_is_no_json_becomes_json_in_a_copy(tmp_path, source):
    convert(source, tmp_path / "first", "hf")
    edit_json(tmp_path / "first" / "config.json", time_step_limit=[0.0, float("inf")], mine=1)
    result = convert(tmp_path / "first", tmp_path / "second", "hf")
    assert not result.copied
    assert strict_json(tmp_path / "second" / "config.json")["mine"] == 1
    assert open_checkpoint(tmp_path / "second").config.dt_limit == (0.0, float("inf"))


def test_head_that_contradicts_the_configuration_is_kept_in_every_format(tmp_path):
    tensors = state_dict(BASE)
    tensors[HEAD] = tensors[EMBEDDING] + 1
    source = save_state_spaces(tmp_path / "source", BASE, tensors)
    for to in ("state-spaces", "hf", "fla"):
        result = convert(source, tmp_path / to, to)
        assert len(result.notes) > 0 and not result.copied
        opened = open_checkpoint(tmp_path / to)
        assert not opened.config.tie_embeddings and opened.notes == ()
        assert same_bits(opened.tensors[HEAD].load(), tensors[HEAD])


def test_tied_head_is_written_where_the_format_has_it(tmp_path, source):
    convert(source, tmp_path / "hf", "hf")
    assert HEAD not in load_file(tmp_path / "hf" / "model.safetensors")
    convert(tmp_path / "hf", tmp_path / "bin", "state-spaces")
    written = torch.load(tmp_path / "bin" / "pytorch_model.bin", weights_only=True)
    assert written[HEAD].data_ptr() == written[EMBEDDING].data_ptr()
    convert(tmp_path / "hf", tmp_path / "safetensors", "state-spaces", weights="safetensors")
    assert HEAD in load_file(tmp_path / "safetensors" / "model.safetensors")
    assert_same_tensors(tmp_path / "bin", tmp_path / "safetensors")


def test_padding_of_the_vocabulary_survives(tmp_path, source):
    convert(source, tmp_path / "hf", "hf")
    assert strict_json(tmp_path / "hf" / "config.json")["vocab_size"] == 64
    assert open_checkpoint(tmp_path / "hf").config.vocab_size == 61


def test_state_spaces_configuration_has_only_keys_of_mamba_ssm(tmp_path, source):
    convert(source, tmp_path / "hf", "hf")
    convert(tmp_path / "hf", tmp_path / "back", "state-spaces")
    written = strict_json(tmp_path / "back" / "config.json")
    # The fields of mamba_ssm 2.3.2's MambaConfig and the arguments of its Mamba2.
    assert set(written) <= set(
        "d_model d_intermediate n_layer vocab_size ssm_cfg attn_layer_idx attn_cfg rms_norm residual_in_fp32 "
        "fused_add_norm pad_vocab_size_multiple tie_embeddings".split()
    )
    assert set(written["ssm_cfg"]) <= set(
        "layer d_state d_conv conv_init expand headdim d_ssm ngroups A_init_range D_has_hdim rmsnorm "
        "norm_before_gate dt_min dt_max dt_init_floor dt_limit bias conv_bias chunk_size".split()
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtype_changes_the_weights_and_never_narrows_the_recurrence(tmp_path, source, dtype):
    convert(source, tmp_path / "out", "hf", dtype=dtype)
    opened = open_checkpoint(tmp_path / "out")
    wanted = getattr(torch, dtype)
    assert strict_json(tmp_path / "out" / "config.json")["dtype"] == dtype
    original = state_dict(BASE)
    for name, tensor in opened.tensors.items():
        kept = name.endswith((".A_log", ".D", ".dt_bias"))
        assert same_bits(tensor.load(), original[name] if kept else original[name].to(wanted))


def test_recurrence_is_widened_with_the_rest(tmp_path):
    half = {name: tensor.half() for name, tensor in state_dict(BASE).items()}
    source = save_state_spaces(tmp_path / "source", BASE, half)
    convert(source, tmp_path / "out", "state-spaces", dtype="float32")
    assert {tensor.dtype for tensor in open_checkpoint(tmp_path / "out").tensors.values()} == {torch.float32}


def test_value_that_a_dtype_cannot_hold_is_named(tmp_path):
    tensors = state_dict(BASE)
    tensors["backbone.norm_f.weight"][0] = 70000.0
    source = save_state_spaces(tmp_path / "source", BASE, tensors)
    said = message(source, tmp_path / "out", "hf", dtype="float16")
    assert "backbone.norm_f.weight" in said and "70000" in said
    assert not (tmp_path / "out").exists()


def test_views_of_a_large_storage_are_written_as_what_they_show(tmp_path):
    tensors = state_dict(BASE)
    large = torch.randn(100, 64, 32)
    tensors[EMBEDDING] = tensors[HEAD] = large[7]
    source = save_state_spaces(tmp_path / "source", BASE, tensors)
    convert(source, tmp_path / "hf", "hf")
    size = (tmp_path / "hf" / "model.safetensors").stat().st_size
    assert size < sum(tensor.nbytes for name, tensor in tensors.items() if name != HEAD) + 10_000
    assert same_bits(load_file(tmp_path / "hf" / "model.safetensors")["backbone.embeddings.weight"], large[7])


def test_hugging_face_pickle_is_read_and_rewritten_as_safetensors(tmp_path, source):
    convert(source, tmp_path / "hf", "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    names = sorted(tensors)
    shards = {"pytorch_model-1.bin": names[::2], "pytorch_model-2.bin": names[1::2]}
    for shard, part in shards.items():
        torch.save({name: tensors[name] for name in part}, tmp_path / "hf" / shard)
    weight_map = {name: shard for shard, part in shards.items() for name in part}
    index = tmp_path / "hf" / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "hf" / "model.safetensors").unlink()
    result = convert(tmp_path / "hf", tmp_path / "out", "hf")
    assert result.files == ("config.json", "model.safetensors")
    assert_same_tensors(tmp_path / "hf", tmp_path / "out")


def test_keys_that_only_others_read_are_kept_within_a_format(tmp_path, source):
    convert(source, tmp_path / "hf", "hf")
    edit_json(
        tmp_path / "hf" / "config.json",
        torch_dtype="float32",
        eos_token_id=[3, 4],
        use_cache=False,
        dtype=...,
    )
    convert(tmp_path / "hf", tmp_path / "out", "hf", dtype="bfloat16")
    written = strict_json(tmp_path / "out" / "config.json")
    assert written["eos_token_id"] == [3, 4]
    assert written["use_cache"] is False
    assert written["dtype"] == "bfloat16" and "torch_dtype" not in written


def test_safetensors_file_with_an_older_name_of_the_embedding_is_read(tmp_path, source):
    convert(source, tmp_path / "hf", "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    tensors[EMBEDDING] = tensors.pop("backbone.embeddings.weight")
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    assert_same_tensors(source, tmp_path / "hf")
    tensors["backbone.embeddings.weight"] = tensors[EMBEDDING].clone()
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    assert "expected one" in message(tmp_path / "hf", tmp_path / "out", "fla")


def test_epsilon_of_the_norms_is_part_of_the_model(tmp_path, source):
    convert(source, tmp_path / "hf", "hf")
    edit_json(tmp_path / "hf" / "config.json", layer_norm_epsilon=1e-6)
    convert(tmp_path / "hf", tmp_path / "fla", "fla")
    expected = replace(variant(), norm_eps=1e-6, gated_norm_eps=1e-6)
    assert open_checkpoint(tmp_path / "fla").config == expected
    assert "epsilon" in message(tmp_path / "hf", tmp_path / "out", "state-spaces")
