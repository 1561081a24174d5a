"""A conversion is whole or not there, and what it cannot do is refused before anything is written."""

import os
import resource

import pytest

from checkpoint_testing import save_state_spaces
from convert_testing import contents, message
from mamba_cli.checkpoint import open_checkpoint
from mamba_cli.convert import convert
from mamba_cli.errors import Mamba2Error
from model_testing import VARIANTS


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


def test_logits_that_differ_are_not_published(tmp_path, source, monkeypatch):
    for wrong in (1e-3, float("nan")):
        monkeypatch.setattr("mamba_cli.convert.logits_difference", lambda *folders, wrong=wrong: wrong)
        assert "logits" in message(source, tmp_path / "hf", "hf", verify=True)
        assert not (tmp_path / "hf").exists()
