"""`mamba2 inspect`, run through main as the shell runs it."""

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mamba_commands.app import main
from mamba_commands.log_axis import BAR, PLAIN_BAR, LogAxis, short
from model_testing import DATA
from quantize_testing import quantize, save

GOLDEN = DATA / "golden"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def planted(tmp_path: Path):
    """Return a function that copies a golden checkpoint with one tensor changed."""

    def plant(name: str, change, model: str = "default") -> str:
        folder = tmp_path / "planted"
        folder.mkdir()
        shutil.copy(GOLDEN / model / "config.json", folder)
        tensors = torch.load(GOLDEN / model / "pytorch_model.bin", weights_only=True)
        tensors[name] = change(tensors[name].clone())
        torch.save(tensors, folder / "pytorch_model.bin")
        return str(folder)

    return plant


def document(capsys: pytest.CaptureFixture, *arguments: str) -> dict:
    def refuse(constant: str):
        raise AssertionError(f"not JSON: {constant}")

    main(["inspect", *arguments, "--json"])
    return json.loads(capsys.readouterr().out, parse_constant=refuse)


def on_terminal(monkeypatch: pytest.MonkeyPatch, columns: int, *arguments: str) -> list[str]:
    terminal = Terminal()
    with monkeypatch.context() as patch:
        patch.setenv("COLUMNS", str(columns))
        patch.setattr(sys, "stdout", terminal)
        assert main(["inspect", *arguments]) == 0
    return terminal.getvalue().splitlines()


@pytest.mark.parametrize("model", ["default", "hybrid", "mamba1", "mlp", "untied"])
def test_json_holds_every_fact_in_strict_json(capsys, model):
    facts = document(capsys, str(GOLDEN / model))
    assert list(facts) == [
        "model", "folder", "format", "reason", "family", "config", "parameters", "stored", "padding", "state",
        "state_quantization", "tokenizer", "layers", "notes",
    ]  # fmt: skip
    original = json.loads((GOLDEN / model / "config.json").read_text())
    assert facts["format"] == "state-spaces"
    assert facts["config"]["d_model"] == original["d_model"]
    assert facts["config"]["tie_embeddings"] == original["tie_embeddings"]
    assert facts["padding"] == 112 - 97
    assert [entry["dtype"] for entry in facts["state"]] == ["fp32", "bf16", "fp16", "int8", "fp8", "int4"]
    assert facts["state_quantization"] is None
    assert len(facts["layers"]) == original["n_layer"]
    for layer in facts["layers"]:
        if layer["kind"] == "attention":
            assert layer["half_life"] is None
        else:
            lives = layer["half_life"]
            assert 0 < lives["smallest"] <= lives["median"] <= lives["largest"]


def test_what_is_infinite_is_null_in_json(capsys, planted):
    folder = planted("backbone.layers.0.mixer.A_log", lambda A_log: A_log.fill_(-torch.inf))
    facts = document(capsys, folder)
    assert facts["config"]["dt_limit"] == [0.0, None]
    assert set(facts["layers"][0]["half_life"].values()) == {None}


def test_piped_tables_are_tab_separated_lines(capsys):
    assert main(["inspect", str(GOLDEN / "hybrid")]) == 0
    facts, state, layers = capsys.readouterr().out.split("\n\n")
    assert {line.count("\t") for line in facts.splitlines()} == {1}
    assert {line.count("\t") for line in state.splitlines()} == {3}
    assert {line.count("\t") for line in layers.splitlines()} == {5}
    values = dict(line.split("\t") for line in facts.splitlines())
    assert values["d_state"] == "32"
    assert values["attn_cfg.num_heads"] == "4"
    attention = layers.splitlines()[2].split("\t")
    assert attention[:3] == ["1", "attention", "-"]
    assert attention[-1] == "4 x 16, kv 4"


def test_the_state_in_the_saved_format_is_the_last_row(capsys, tmp_path):
    quantize(save(tmp_path), tmp_path / "out")
    assert main(["inspect", str(tmp_path / "out")]) == 0
    last = capsys.readouterr().out.split("\n\n")[1].splitlines()[-1].split("\t")
    entry = document(capsys, str(tmp_path / "out"))["state"][-1]
    assert last == ["int8:4 (saved)", str(entry["ssm"]), str(entry["conv"]), "0"]
    assert entry["saved"] and entry["dtype"] == "int8:4"


def test_a_terminal_of_60_columns_holds_every_layer_on_a_line(monkeypatch):
    for model in ("hybrid", "mamba1"):
        lines = on_terminal(monkeypatch, 60, str(GOLDEN / model))
        layers = lines[lines.index("") :]
        assert max(map(len, layers)) <= 60
        assert any(BAR[2] in line for line in layers)


def test_a_wide_terminal_gives_the_bars_more_room(monkeypatch):
    def longest(columns: int) -> int:
        return max(map(len, on_terminal(monkeypatch, columns, str(GOLDEN / "default"))[-2:]))

    assert longest(60) < longest(100) <= 100


def test_bars_are_ascii_where_the_terminal_is(monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    text = "\n".join(on_terminal(monkeypatch, 80, str(GOLDEN / "default")))
    assert text.isascii()
    assert PLAIN_BAR[2] in text


def test_tensors_lists_each_tensor_once(capsys):
    assert main(["inspect", str(GOLDEN / "default"), "--tensors"]) == 0
    lines = capsys.readouterr().out.splitlines()
    tensors = torch.load(GOLDEN / "default" / "pytorch_model.bin", weights_only=True)
    assert sorted(line.split("\t")[0] for line in lines[1:]) == sorted(set(tensors) - {"lm_head.weight"})
    assert "backbone.embedding.weight\tfloat32\t112x64\t28672" in lines
    listed = document(capsys, str(GOLDEN / "default"), "--tensors")["tensors"]
    assert len(listed) == len(lines) - 1


def test_a_sound_checkpoint_passes_the_check(capsys):
    assert main(["inspect", str(GOLDEN / "default"), "--check"]) == 0
    captured = capsys.readouterr()
    results = {line.split("\t")[1]: line.split("\t")[0] for line in captured.out.splitlines()[1:]}
    assert [results[check] for check in ("nan", "inf", "zero", "config")] == ["ok"] * 4
    assert captured.err == ""


@pytest.mark.parametrize(
    ("name", "value", "check"),
    [
        ("backbone.layers.1.mixer.in_proj.weight", float("nan"), "nan"),
        ("backbone.layers.0.mixer.dt_bias", float("inf"), "inf"),
        ("backbone.layers.0.mixer.out_proj.weight", 0.0, "zero"),
        ("backbone.layers.0.mixer.conv1d.weight", 0.5, "constant"),
    ],
)
def test_check_names_a_broken_tensor_and_fails(capsys, planted, name, value, check):
    folder = planted(name, lambda tensor: tensor.fill_(value))
    assert main(["inspect", folder, "--check"]) == 1
    captured = capsys.readouterr()
    assert f"broken\t{check}\t{name}\t" in captured.out
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1


def test_check_in_json_says_what_is_broken(capsys, planted):
    folder = planted("backbone.norm_f.weight", lambda tensor: tensor.fill_(0))
    check = document(capsys, folder, "--check")["check"]
    assert check["sound"] is False
    finding = next(finding for finding in check["findings"] if finding["broken"])
    assert (finding["check"], finding["subject"]) == ("zero", "backbone.norm_f.weight")


def test_a_config_that_contradicts_the_tensors_is_reported_with_both_numbers(capsys, planted):
    folder = planted("backbone.norm_f.weight", lambda tensor: tensor[:-1])
    assert main(["inspect", folder, "--check"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "63" in captured.err
    assert "64" in captured.err


def test_a_head_unlike_the_embedding_it_is_tied_to_is_noted(capsys, planted):
    folder = planted("lm_head.weight", lambda head: head + 1)
    (note,) = document(capsys, folder)["notes"]
    assert main(["inspect", folder, "--check"]) == 0
    assert f"suspicious\tconfig\tcheckpoint\t{note}" in capsys.readouterr().out


def test_inspecting_loads_no_gpu_code():
    program = (
        "import sys; from mamba_commands.app import main; main(sys.argv[1:]);"
        "kernels = [name for name in sys.modules if name.startswith(('triton', 'mamba_kernels'))];"
        "print({name for name in kernels if 'triton' in name}, file=sys.stderr)"
    )
    arguments = [sys.executable, "-c", program, "inspect", str(GOLDEN / "default"), "--check"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == "set()\n"


def test_axis_covers_whole_decades_and_orders_its_columns():
    axis = LogAxis([0.7, 4.0, 300.0], 31)
    assert axis.labels().split() == ["0.1", "1", "10", "100", "1k"]
    assert len(axis.labels()) == 31
    bar = axis.bar(0.7, 4.0, 300.0)
    assert len(bar) <= 31
    assert bar.index(BAR[0]) < bar.index(BAR[2]) < bar.index(BAR[3])
    assert bar.index(BAR[0]) == round(30 * 0.845 / 4)


def test_axis_draws_a_point_and_what_never_ends():
    axis = LogAxis([1.0, 100.0, float("inf")], 20)
    assert axis.bar(10.0, 10.0, 10.0).strip() == BAR[2]
    assert len(axis.bar(1.0, 2.0, float("inf"))) == 20
    assert axis.bar(1.0, float("nan"), 2.0) == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.73, "0.73"), (114.2, "114"), (999.7, "1k"), (12345, "12.3k"), (2.5e6, "2.5M"), (1e15, "1e+15")],
)
def test_short_numbers_have_three_digits(value, text):
    assert short(value) == text
