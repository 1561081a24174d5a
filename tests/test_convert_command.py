"""`mamba2 convert` as it is typed."""

import json
import os
import shutil

from convert_testing import contents, word_tokenizer
from mamba_commands.app import main


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
    capsys.readouterr()
    assert main(["convert", "no-such", str(tmp_path / "x"), "--to", "hf", "--bin"]) == 2
    assert "error: --bin: expected --to state-spaces beside it, got --to hf\n" in capsys.readouterr().err
    shards = ["--to", "state-spaces", "--max-shard-size", "1KB"]
    assert main(["convert", "no-such", str(tmp_path / "x"), *shards, "--bin"]) == 2
    assert "error: --max-shard-size: expected no --bin beside it" in capsys.readouterr().err
    assert main(["convert", str(source), str(tmp_path / "x"), *shards]) == 1
    assert "hint: --safetensors writes as many files as it takes\n" in capsys.readouterr().err
    assert main(["convert", str(source), str(tmp_path / "x"), "--to", "hf", "--max-shard-size", "0"]) == 2
    assert "error: --max-shard-size: expected a number of bytes" in capsys.readouterr().err
    shutil.copytree(source, tmp_path / "broken")
    os.truncate(tmp_path / "broken" / "pytorch_model.bin", 1000)
    assert main(["convert", str(tmp_path / "broken"), str(tmp_path / "x"), "--to", "hf"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and "cut short" in error
    assert not (tmp_path / "x").exists()
