"""A conversion is exact, whole or not there, and what other libraries load."""

import json
import os
import resource
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import (
    FalconMambaConfig,
    FalconMambaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

from checkpoint_testing import edit_json, save_state_spaces, state_dict, strict_json
from mamba_cli.checkpoint import open_checkpoint
from mamba_cli.convert import convert
from mamba_cli.errors import Mamba2Error
from mamba_cli.load import load_model
from mamba_cli.storage import same_bits
from mamba_commands.app import main
from model_testing import BASE, DATA, VARIANTS, variant

HEAD, EMBEDDING = "lm_head.weight", "backbone.embedding.weight"
HELD_BY_ALL = {
    name: VARIANTS[name]
    for name in (
        "plain groups_between_one_and_nheads groups_as_heads wide_state conv_of_two dt_limited "
        "projection_bias no_conv_bias residual_in_model_dtype untied"
    ).split()
} | {
    "three_times_as_wide": variant(d_model=48, d_inner=144, d_ssm=144),
    # A convolution whose weight has as many channels as columns, which says nothing about its layout.
    "square_conv": variant(d_model=1, d_inner=2, d_ssm=2, headdim=2, d_state=1),
}


@pytest.fixture
def source(tmp_path):
    return save_state_spaces(tmp_path / "source", BASE)


def message(*arguments, **options) -> str:
    with pytest.raises(Mamba2Error) as caught:
        convert(*arguments, **options)
    assert "\n" not in caught.value.message
    return caught.value.message


def contents(folder) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_same_tensors(first, second) -> None:
    first, second = open_checkpoint(first).tensors, open_checkpoint(second).tensors
    assert first.keys() == second.keys()
    assert all(same_bits(first[name].load(), second[name].load()) for name in first)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


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


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"to": "hf", "weights": "bin"}, "bin"),
        ({"to": "state-spaces", "max_shard_size": "1GB"}, "one file"),
        ({"to": "hf", "dtype": "int8"}, "int8"),
        ({"to": "hf", "max_shard_size": "many"}, "many"),
        ({"to": "gguf2"}, "gguf2"),
        ({"to": "hf", "tokenizer": "/nowhere/at/all"}, "/nowhere/at/all"),
    ],
)
def test_option_without_a_meaning_is_refused_before_writing(tmp_path, source, options, named):
    assert named in message(source, tmp_path / "out", **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize("name", ["mlp", "hybrid", "layer_norm", "part_of_the_width_is_ssm"])
@pytest.mark.parametrize("to", ["hf", "fla"])
def test_model_that_the_target_cannot_hold_stops_before_writing(tmp_path, name, to):
    source = save_state_spaces(tmp_path / "source", VARIANTS[name])
    assert f"{to}: expected a model that" in message(source, tmp_path / "out", to)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_destination_in_or_around_the_source_is_refused(tmp_path, source, monkeypatch):
    before = contents(tmp_path)
    (tmp_path / "link").symlink_to(source)
    for destination in (source, source / "out", tmp_path, tmp_path / "link", tmp_path / "link" / "out"):
        message(source, destination, "hf", overwrite=True)
    monkeypatch.chdir(tmp_path)
    message(source, ".", "hf", overwrite=True)
    (tmp_path / "link").unlink()
    assert contents(tmp_path) == before


def test_existing_destination_is_replaced_only_when_asked(tmp_path, source):
    old = tmp_path / "out"
    old.mkdir()
    convert(source, old, "hf")  # an empty folder is no loss
    (old / "note.txt").write_text("mine")
    before = contents(old)
    assert "with files" in message(source, old, "fla")
    assert contents(old) == before
    convert(source, old, "fla", overwrite=True)
    assert contents(old).keys() == {"config.json", "model.safetensors"}
    assert open_checkpoint(old).format == "fla"
    (tmp_path / "file").write_text("x")
    assert "a file" in message(source, tmp_path / "file", "hf", overwrite=True)


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError(28, "No space left on device"), MemoryError])
@pytest.mark.parametrize("share", [0.2, 0.7], ids=["writing", "comparing"])
def test_failure_half_way_leaves_the_old_output_and_nothing_else(tmp_path, source, failure, share):
    convert(source, tmp_path / "out", "fla")
    before = contents(tmp_path)
    done = 0.0

    def fail(more: float) -> None:
        nonlocal done
        done += more
        if done > share:
            raise failure

    with pytest.raises((KeyboardInterrupt, Mamba2Error, MemoryError)):
        convert(source, tmp_path / "out", "hf", overwrite=True, on_progress=fail)
    with pytest.raises((KeyboardInterrupt, Mamba2Error, MemoryError)):
        done = 0.0
        convert(source, tmp_path / "new", "hf", on_progress=fail)
    assert contents(tmp_path) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


@pytest.mark.parametrize("to", ["hf", "state-spaces"])
def test_disk_that_takes_no_more_leaves_nothing(tmp_path, source, to):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        said = message(source, tmp_path / "out", to, dtype="bfloat16")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "File too large" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_output_that_reads_back_different_is_not_published(tmp_path, source, monkeypatch):
    monkeypatch.setattr("mamba_cli.convert.same_bits", lambda a, b: a.shape != (4,))
    assert "dt_bias" in message(source, tmp_path / "out", "hf")
    assert not (tmp_path / "out").exists()


def test_output_can_be_read_by_others(tmp_path, source):
    umask = os.umask(0o022)
    try:
        convert(source, tmp_path / "out", "hf")
    finally:
        os.umask(umask)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o755


def word_tokenizer(folder, size: int = 61):
    folder.mkdir(exist_ok=True)
    vocabulary = {"<|endoftext|>": 0} | {f"w{index}": index for index in range(1, size)}
    Tokenizer(models.WordLevel(vocabulary, unk_token="w1")).save(str(folder / "tokenizer.json"))
    return folder


def test_tokenizer_goes_along_and_gives_its_end_token(tmp_path, source):
    word_tokenizer(source)
    (source / "generation_config.json").write_text("{}")
    result = convert(source, tmp_path / "hf", "hf")
    assert result.notes == ()
    assert {"tokenizer.json", "generation_config.json"} <= set(result.files)
    written = strict_json(tmp_path / "hf" / "config.json")
    assert (written["eos_token_id"], written["bos_token_id"]) == (0, None)


def test_named_tokenizer_is_the_one_copied(tmp_path, source):
    word_tokenizer(source, 10)
    other = word_tokenizer(tmp_path / "other", 20)
    (other / "tokenizer_config.json").write_text('{"bos_token": "w7"}')
    (other / "secret.txt").write_text("x")
    convert(source, tmp_path / "hf", "hf", tokenizer=str(other))
    files = contents(tmp_path / "hf")
    assert files["tokenizer.json"] == (other / "tokenizer.json").read_bytes()
    assert "secret.txt" not in files
    assert strict_json(tmp_path / "hf" / "config.json")["bos_token_id"] == 7
    convert(source, tmp_path / "file", "hf", tokenizer=str(other / "tokenizer.json"))
    assert contents(tmp_path / "file")["tokenizer.json"] == files["tokenizer.json"]


def test_tokenizer_linked_from_outside_is_not_copied(tmp_path, source):
    word_tokenizer(tmp_path / "other")
    (source / "tokenizer.json").symlink_to(tmp_path / "other" / "tokenizer.json")
    assert "inside the folder" in message(source, tmp_path / "hf", "hf")


def test_tokenizer_that_does_not_fit_goes_along_unless_it_was_named(tmp_path, source):
    word_tokenizer(source, 99)
    result = convert(source, tmp_path / "hf", "hf")
    assert "98" in result.notes[0] and "tokenizer.json" in result.files
    assert "98" in message(source, tmp_path / "again", "hf", tokenizer=str(source))


def test_model_without_a_tokenizer_converts_and_says_so(tmp_path, source):
    result = convert(source, tmp_path / "hf", "hf")
    assert result.tokenizer is None
    assert "no tokenizer was copied" in result.notes[0]


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


def test_logits_that_differ_are_not_published(tmp_path, source, monkeypatch):
    for wrong in (1e-3, float("nan")):
        monkeypatch.setattr("mamba_cli.convert.logits_difference", lambda *folders, wrong=wrong: wrong)
        assert "logits" in message(source, tmp_path / "hf", "hf", verify=True)
        assert not (tmp_path / "hf").exists()


def test_command_prints_the_folder_and_says_the_rest_on_stderr(tmp_path, source, capsys):
    assert main(["convert", str(source), str(tmp_path / "hf"), "--to", "hf"]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{tmp_path / 'hf'}\n"
    assert "state-spaces to hf" in captured.err and "warning: no tokenizer" in captured.err


def test_command_prints_one_strict_json_document(tmp_path, source, capsys):
    word_tokenizer(source)
    arguments = [
        "convert",
        str(source),
        str(tmp_path / "out"),
        "--to",
        "state-spaces",
        "--safetensors",
        "--json",
    ]
    assert main([*arguments, "--dtype", "bfloat16", "--max-shard-size", "20KB"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert captured.err == ""
    assert document["format"] == "state-spaces"
    assert document["dtype"] == "bfloat16"
    assert document["files"] == sorted(contents(tmp_path / "out"))
    assert main(arguments) == 1  # it is there now
    assert "hint: --overwrite replaces it" in capsys.readouterr().err


def test_command_refuses_wrong_usage_with_2_and_broken_input_with_1(tmp_path, source, capsys):
    assert main(["convert", str(source), str(tmp_path / "x"), "--to", "pdf"]) == 2
    assert main(["convert", str(source), str(tmp_path / "x")]) == 2
    assert main(["convert", str(source), str(tmp_path / "x"), "--to", "hf", "--max-shard-size", "0"]) == 2
    assert "error: --max-shard-size: expected a number of bytes" in capsys.readouterr().err
    shutil.copytree(source, tmp_path / "broken")
    os.truncate(tmp_path / "broken" / "pytorch_model.bin", 1000)
    assert main(["convert", str(tmp_path / "broken"), str(tmp_path / "x"), "--to", "hf"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and "cut short" in error
    assert not (tmp_path / "x").exists()


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
