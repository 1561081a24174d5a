"""A state format on disk: the scales, and the folder that is still the plain model."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint_testing import edit_json, save_state_spaces, state_dict
from mamba_cli.checkpoint import open_checkpoint
from mamba_cli.convert import convert
from mamba_cli.errors import Mamba2Error
from mamba_cli.load import load_model
from mamba_cli.publish import check_destination
from mamba_cli.quantize import saved
from mamba_cli.quantize.saved import check_can_carry, find_section, read_saved, write_quantized
from mamba_cli.quantize.section import write_section
from model_testing import BASE, hybrid
from quantize_testing import IDS, MAMBA1, digest, quantize, save, some_format, some_scales


@pytest.mark.parametrize("to", ["state-spaces", "hf", "fla"])
@pytest.mark.parametrize("outer", [False, True])
def test_the_folder_holds_the_source_and_the_format_and_the_source_is_untouched(tmp_path, to, outer):
    source = save(tmp_path, to)
    before = digest(source)
    written = quantize(source, tmp_path / "out", outer=outer)
    assert digest(source) == before
    after = digest(tmp_path / "out")
    assert set(written.files) == set(after)
    for name, content in before.items():
        assert name == "config.json" or after[name] == content
    assert (to == "state-spaces") == (after["config.json"] == before["config.json"])
    format, scales = read_saved(open_checkpoint(tmp_path / "out"))
    assert format == some_format()
    for kind in ("half_lives", "columns", "conv"):
        for found, expected in zip(
            getattr(scales, kind), getattr(some_scales(outer=outer), kind), strict=True
        ):
            assert found is expected is None or torch.equal(found, expected)


def test_weights_are_links_and_everything_else_is_a_file_of_its_own(tmp_path):
    source = save(tmp_path, "hf")
    written = quantize(source, tmp_path / "out")
    for name in written.files:
        path = tmp_path / "out" / name
        assert not path.is_symlink()
        same = (source / name).exists() and os.path.samefile(path, source / name)
        assert same == (name == "model.safetensors")
    assert written.linked == (source / "model.safetensors").stat().st_size


@pytest.fixture
def no_links(monkeypatch):
    def refuse(*arguments):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)


def test_weights_are_copied_where_they_cannot_be_linked(tmp_path, no_links):
    source = save(tmp_path, "hf")
    written = quantize(source, tmp_path / "out")
    assert written.linked == 0
    assert not os.path.samefile(tmp_path / "out" / "model.safetensors", source / "model.safetensors")
    assert digest(tmp_path / "out")["model.safetensors"] == digest(source)["model.safetensors"]


def test_copying_says_how_far_it_is(tmp_path, monkeypatch, no_links):
    monkeypatch.setattr(saved, "COPIED_AT_ONCE", 5000)
    shares = []
    written = quantize(save(tmp_path, "hf"), tmp_path / "out", on_progress=shares.append)
    assert sum(shares) == pytest.approx(1)
    assert max(shares) == 5000 / (2 * written.copied)


@pytest.mark.parametrize("other", [b"b", b"ba", b""])
def test_a_copy_that_differs_is_refused(tmp_path, other):
    (tmp_path / "source").write_bytes(b"a")
    with pytest.raises(Mamba2Error, match="target: expected the source's bytes, got others"):
        saved._copy(
            tmp_path / "source", tmp_path / "target", lambda n: (tmp_path / "source").write_bytes(other)
        )


def test_a_snapshot_of_links_into_the_hubs_cache_becomes_files(tmp_path):
    source = save(tmp_path, "hf")
    snapshot, blobs = tmp_path / "repo" / "snapshots" / "abc", tmp_path / "repo" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(source.iterdir()):
        path.rename(blobs / str(number))  # there a file's name is the hash of its content
        (snapshot / path.name).symlink_to(Path("../../blobs") / str(number))
    written = quantize(snapshot, tmp_path / "out")
    assert written.linked == (snapshot / "model.safetensors").stat().st_size
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))
    assert (tmp_path / "out" / "README.md").read_text() == "read me"
    assert open_checkpoint(tmp_path / "out").config == open_checkpoint(snapshot).config


def test_a_link_out_of_the_source_is_not_followed(tmp_path):
    source = save(tmp_path)
    (tmp_path / "secret").write_text("secret")
    (source / "notes.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(Mamba2Error, match="expected files inside the folder"):
        quantize(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_only_the_checkpoints_own_files_are_taken_along(tmp_path):
    source = save(tmp_path, "hf")
    own = {"LICENSE", "NOTICE.txt", "chat_template.jinja", "tokenizer.model.v3", "modeling_mine.py"}
    own |= {"additional_chat_templates/tool.jinja"}
    others = {"optimizer.pt", "training_args.bin", "model.gguf", "consolidated.safetensors", "run.log"}
    others |= {
        ".git/config",
        ".cache/a.json",
        "original/model.safetensors",
        "logs/events.txt",
        ".hidden.json",
    }
    expected = set(digest(source)) | own | {"state_scales.safetensors"}
    for name in own | others:
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("x")
    assert set(quantize(source, tmp_path / "out").files) == expected
    assert {path.name for path in (tmp_path / "out").iterdir() if path.is_dir()} == {
        "additional_chat_templates"
    }


def test_shards_are_taken_from_where_the_index_has_them(tmp_path):
    source = save(tmp_path, "hf")
    (source / "shards").mkdir()
    (source / "model.safetensors").rename(source / "shards" / "first.safetensors")
    names = load_file(source / "shards" / "first.safetensors")
    index = {"weight_map": dict.fromkeys(names, "shards/first.safetensors")}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    (source / "shards" / "optimizer.pt").write_text("x")
    written = quantize(source, tmp_path / "out")
    assert {"model.safetensors.index.json", "shards/first.safetensors"} <= set(written.files)
    assert "shards/optimizer.pt" not in written.files
    assert written.linked == (source / "shards" / "first.safetensors").stat().st_size


def test_weights_of_the_other_kind_are_taken_along_for_tools_that_read_no_others(tmp_path):
    source = save(tmp_path)
    state = torch.load(source / "pytorch_model.bin")
    save_file({name: tensor.clone() for name, tensor in state.items()}, source / "model.safetensors")
    assert {"pytorch_model.bin", "model.safetensors"} <= set(quantize(source, tmp_path / "out").files)


def test_transformers_loads_the_folder_as_the_plain_model(tmp_path):
    from transformers import AutoModelForCausalLM

    source = save(tmp_path, "hf")
    quantize(source, tmp_path / "out")
    logits = [
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(IDS).logits
        for folder in (source, tmp_path / "out")
    ]
    assert torch.equal(*logits)


def test_mamba_ssm_finds_no_key_that_it_does_not_know(tmp_path):
    quantize(save(tmp_path), tmp_path / "out")
    known = {
        "d_model", "d_intermediate", "n_layer", "vocab_size", "ssm_cfg", "attn_layer_idx", "attn_cfg",
        "rms_norm", "residual_in_fp32", "fused_add_norm", "pad_vocab_size_multiple", "tie_embeddings",
    }  # fmt: skip
    assert json.loads((tmp_path / "out" / "config.json").read_text()).keys() <= known
    assert find_section(tmp_path / "out")[1].endswith("state_quantization.json")


def test_a_configuration_with_infinity_keeps_it(tmp_path):
    source = save(tmp_path, "hf")
    edit_json(source / "config.json", time_step_limit=[0.0, float("inf")])
    quantize(source, tmp_path / "out")
    assert '"state_quantization"' in (tmp_path / "out" / "config.json").read_text()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["time_step_limit"] == [
        0.0,
        float("inf"),
    ]


def test_a_format_replaces_the_one_that_was_there(tmp_path):
    quantize(save(tmp_path, "hf"), tmp_path / "first", outer=True)
    other = some_format(seed=9)
    write_quantized(open_checkpoint(tmp_path / "first"), tmp_path / "second", other, some_scales())
    format, scales = read_saved(open_checkpoint(tmp_path / "second"))
    assert format == other
    assert not scales.outer


@pytest.mark.parametrize("to", ["state-spaces", "hf", "fla"])
def test_converting_takes_the_format_along(tmp_path, to):
    quantize(save(tmp_path, "hf"), tmp_path / "first", outer=True)
    convert(tmp_path / "first", tmp_path / "second", to)
    format, scales = read_saved(open_checkpoint(tmp_path / "second"))
    assert format == some_format()
    assert torch.equal(scales.columns[1], some_scales(outer=True).columns[1])


@pytest.mark.parametrize("to", ["state-spaces", "fla"])
def test_a_section_written_by_hand_needs_no_scales_and_is_taken_along(tmp_path, to):
    source = save(tmp_path, "hf")
    by_hand = {"version": 1, "name": "mine", "rounding": "nearest", "window": 2, "layers": ["int8", "fp8"]}
    edit_json(source / "config.json", state_quantization=by_hand)
    convert(source, tmp_path / "second", to)
    format, _ = read_saved(open_checkpoint(tmp_path / "second"))
    assert [layer.heads for layer in format.layers] == [("int8",) * 4, ("fp8",) * 4]
    assert load_model(tmp_path / "second", device="cpu").state_dtype == "mine"
    assert not (tmp_path / "second" / "state_scales.safetensors").exists()


def test_a_format_of_its_own_file_goes_before_a_key_of_the_configuration(tmp_path):
    source = save(tmp_path)
    edit_json(source / "config.json", state_quantization=write_section(some_format(seed=1)))
    quantize(source, tmp_path / "out")
    assert read_saved(open_checkpoint(tmp_path / "out"))[0] == some_format()


def test_the_destination_is_refused_before_anything_is_written(tmp_path):
    source = save(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    with pytest.raises(Mamba2Error, match="expected a new or empty folder"):
        quantize(source, tmp_path / "out")
    with pytest.raises(Mamba2Error, match="expected a new folder, got the source itself"):
        quantize(source, source)
    quantize(source, tmp_path / "out", overwrite=True)
    assert not (tmp_path / "out" / "mine").exists()


def test_a_place_that_nothing_can_be_written_in_is_refused_and_a_new_one_is_left_as_it_was(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(Mamba2Error, match=r"out: expected a place to write, got: .*file: Not a directory"):
        check_destination(tmp_path / "file" / "out", save(tmp_path), False)
    check_destination(tmp_path / "new" / "out", tmp_path / "source", False)
    assert not (tmp_path / "new").exists()
    assert not list(tmp_path.glob(".*"))


def test_a_single_file_cannot_carry_a_format(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(Mamba2Error, match=r"expected a folder, .*, got one file") as caught:
        check_can_carry("model.gguf", tmp_path / "model.gguf")
    assert caught.value.hint.startswith("mamba2 convert model.gguf FOLDER --to hf")


def test_a_checkpoint_without_a_section_has_no_format(tmp_path):
    assert read_saved(open_checkpoint(save(tmp_path))) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("layers.1.half_lives"),
            "expected layers.1.half_lives of shape \\(4,\\), got no such",
        ),
        (lambda t: t.update(other=torch.ones(1)), "expected only the scales of this format, got other"),
        (
            lambda t: t.update({"layers.0.columns": torch.ones(4, 15)}),
            "layers.0.columns: expected float32 of shape \\(4, 16\\), got torch.float32 \\(4, 15\\)",
        ),
        (
            lambda t: t.update({"layers.0.columns": torch.ones(4, 16, dtype=torch.float64)}),
            "layers.0.columns: expected float32",
        ),
        (lambda t: t["layers.0.columns"].zero_(), "layers.0.columns: expected positive finite numbers"),
        (lambda t: t["layers.0.columns"].fill_(float("inf")), "layers.0.columns: expected positive finite"),
        (lambda t: t["layers.1.half_lives"].fill_(float("nan")), "layers.1.half_lives: expected positive"),
        (lambda t: t["layers.1.conv"].fill_(-1), "layers.1.conv: expected positive"),
    ],
)
def test_scales_that_do_not_belong_to_the_model_are_refused(tmp_path, change, message):
    quantize(save(tmp_path, "hf"), tmp_path / "out", outer=True)
    path = tmp_path / "out" / "state_scales.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path)
    with pytest.raises(Mamba2Error, match=message):
        read_saved(open_checkpoint(tmp_path / "out"))


def test_scales_that_are_missing_or_elsewhere_are_refused(tmp_path):
    quantize(save(tmp_path, "hf"), tmp_path / "out", outer=True)
    path = tmp_path / "out" / "state_scales.safetensors"
    path.rename(tmp_path / "elsewhere.safetensors")
    with pytest.raises(Mamba2Error, match="got no such file") as caught:
        read_saved(open_checkpoint(tmp_path / "out"))
    assert caught.value.hint == "--state-dtype fp32 does without; mamba2 quantize-state writes them"
    path.symlink_to(tmp_path / "elsewhere.safetensors")
    with pytest.raises(Mamba2Error, match="expected files inside the folder"):
        read_saved(open_checkpoint(tmp_path / "out"))


def test_a_plain_state_needs_nothing_of_what_was_saved(tmp_path):
    quantize(save(tmp_path, "hf"), tmp_path / "out", outer=True)
    (tmp_path / "out" / "state_scales.safetensors").unlink()
    with pytest.raises(Mamba2Error, match="state_scales"):
        load_model(tmp_path / "out", device="cpu")
    assert load_model(tmp_path / "out", device="cpu", state_dtype="fp32").state_format is None


def test_column_scales_need_their_file(tmp_path):
    quantize(save(tmp_path, "hf"), tmp_path / "out", outer=True)
    config = tmp_path / "out" / "config.json"
    section = json.loads(config.read_text())["state_quantization"]
    edit_json(config, state_quantization=section | {"scales": None})
    with pytest.raises(
        Mamba2Error, match=r"scales: expected state_scales\.safetensors for this format, got none"
    ):
        read_saved(open_checkpoint(tmp_path / "out"))


@pytest.mark.parametrize("config", [BASE, hybrid(), MAMBA1], ids=["mamba2", "hybrid", "mamba1"])
@pytest.mark.parametrize("outer", [False, True])
def test_what_was_written_and_loaded_gives_the_logits_of_the_model_it_was_made_of(tmp_path, config, outer):
    source = save_state_spaces(tmp_path / "plain", config, state_dict(config))
    write_quantized(
        open_checkpoint(source), tmp_path / "out", some_format(config), some_scales(config, outer)
    )
    columns = some_scales(config, outer).columns if outer else None
    made = load_model(source, device="cpu").with_state(some_format(config), columns)
    loaded = load_model(tmp_path / "out", device="cpu")
    for lm in (made, loaded):
        assert lm.config == config
    states = [lm.prefill(IDS[:, :12])[1] for lm in (made, loaded)]
    for token in range(12, 30):
        first, second = (
            lm.step_(IDS[:, token], state) for lm, state in zip((made, loaded), states, strict=True)
        )
        assert torch.equal(first, second)


@pytest.mark.parametrize("words", ["int8:4", "int8:outer:4", "fp32"])
def test_words_override_what_was_written_and_take_its_column_scales_where_they_say_so(tmp_path, words):
    quantize(save(tmp_path, "hf"), tmp_path / "out", outer=True)
    lm = load_model(tmp_path / "out", device="cpu", state_dtype=words)
    assert (lm.columns is not None) == ("outer" in words)
    if lm.columns is not None:
        assert torch.equal(lm.columns[0], some_scales(outer=True).columns[0])
