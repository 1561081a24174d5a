"""`mamba2 quantize-state`, run through main() over a small checkpoint on disk."""

import contextlib
import io
import json
import sys
from pathlib import Path

import pytest
import torch

from checkpoint_testing import save_state_spaces, state_dict
from generation_testing import save_word_level
from mamba_cli.config import ModelConfig
from mamba_cli.convert import convert
from mamba_cli.load import load_model
from mamba_cli.perplexity.plan import make_plan
from mamba_cli.perplexity.tokens import Document
from mamba_cli.quantize.report import measure_losses
from mamba_cli.quantize.section import write_section
from mamba_cli.quantize.sensitivity import Widened, reach, widen
from mamba_cli.state_format import StateFormat, layer_seed
from mamba_commands.app import main
from mamba_commands.output import Output
from mamba_kernels.packed_state import LayerFormat
from model_testing import BASE, hybrid
from quantize_testing import MAMBA1

IDS = torch.randint(BASE.vocab_size, (90,), generator=torch.Generator().manual_seed(0)).tolist()
QUICK = ("--device", "cpu", "--window", "24", "--sensitivity-tokens", "40", "--compare", "int4")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def save_model(folder: Path, config: ModelConfig) -> Path:
    """Write a model with logits that differ, and a tokenizer that reads numbers as ids."""
    tensors = state_dict(config)
    for name in ("backbone.embedding.weight", "lm_head.weight"):
        tensors[name] = tensors[name] * 30
    save_state_spaces(folder, config, tensors)
    save_word_level(folder, [str(number) for number in range(config.vocab_size)])
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder / "plain", BASE)
    convert(folder / "plain", folder / "hf", "hf")
    return str(folder / "hf")


@pytest.fixture
def text(tmp_path) -> str:
    (tmp_path / "text.txt").write_text(" ".join(map(str, IDS)))
    return str(tmp_path / "text.txt")


@pytest.fixture
def run(model, text, capfd):
    """Run `mamba2 quantize-state MODEL ARGUMENTS` on the text; return (status, stdout, stderr)."""

    def run(*arguments: str, model: str = model):
        capfd.readouterr()
        status = main(["quantize-state", model, "--calibrate", text, *QUICK, *arguments])
        return status, *capfd.readouterr()

    return run


def strict(text: str) -> dict:
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    return json.loads(text, parse_constant=refuse)


def test_without_an_output_it_only_reports(run, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    status, out, err = run()
    assert status == 0, err
    assert err.splitlines()[-1] == "hint: -o OUT writes the model with this choice in it"
    assert sorted(tmp_path.rglob("*")) == before
    tables = [[line.split("\t") for line in table.splitlines()] for table in out.strip().split("\n\n")]
    assert [table[0][0] for table in tables] == ["format", "format", "tokens read", "layer", "definition"]
    assert [row[0] for row in tables[0][1:]] == ["fp32", "int4", "int8 *"]
    assert [row[0] for row in tables[1][1:]] == ["int4", "int8 *"]
    for table in tables:
        assert len({len(row) for row in table}) == 1


def test_a_short_text_is_warned_of_also_when_quiet(run, text):
    assert "warning: 89 tokens are few: " in run("-q")[2]
    Path(text).write_text(" ".join(map(str, IDS * 12)))
    assert run("-q", "--compare", "")[2] == ""


def test_a_text_with_nothing_to_predict_is_named(run, text):
    Path(text).write_text("7")
    status, out, err = run()
    assert (status, out) == (1, "")
    assert err.startswith(f"error: {text}: expected at least 2 tokens, ")


def test_a_text_that_is_not_there_is_said_before_a_model_is_loaded(capfd, model, monkeypatch):
    monkeypatch.setattr("mamba_cli.load_model", lambda *arguments, **options: pytest.fail("was loaded"))
    assert main(["quantize-state", model, "--calibrate", "no/book.md.txt"]) == 1
    assert capfd.readouterr().err == "error: text: expected a file, got no/book.md.txt: no such file\n"


def test_a_batch_that_the_memory_cannot_hold_is_refused_before_the_losses_are_measured(run, monkeypatch):
    monkeypatch.setattr("mamba_cli.quantize.study.choose", lambda *arguments: pytest.fail("was measured"))
    status, out, err = run("--batch-size", "999999999")
    assert (status, out) == (1, "")
    assert err.startswith("error: --batch-size: expected at most ") and "got 999999999\n" in err


def test_writing_has_a_progress_bar(run, tmp_path, monkeypatch):
    shown = {}

    @contextlib.contextmanager
    def progress(self, total, label):
        shown[label] = 0
        yield lambda amount, label=label: shown.update({label: shown.get(label, 0) + amount})

    monkeypatch.setattr(Output, "progress", progress)
    assert run("-o", str(tmp_path / "out"))[0] == 0
    assert shown["writing"] == pytest.approx(1)


def test_formats_to_compare_may_have_spaces_between(run):
    found = strict(run("--json", "--compare", " bf16, int4,")[1])
    assert [one["name"] for one in found["formats"]] == ["fp32", "bf16", "int4", "int8"]


def test_json_holds_the_whole_report(run):
    status, out, err = run("--json", "--state-dtype", "int4:nearest:2:uniform")
    assert status == 0, err
    found = strict(out)
    assert found["output"] is None
    section = found["state_quantization"]
    assert (section["name"], section["rounding"], section["window"]) == (
        "int4:nearest:2:uniform",
        "nearest",
        2,
    )
    assert section["layers"] == ["int4", "int4"]
    by_name = {one["name"]: one for one in found["formats"]}
    assert list(by_name) == ["fp32", "int4", "int4:nearest:2:uniform"]
    assert [one["chosen"] for one in found["formats"]] == [False, False, True]
    assert by_name["fp32"]["loss"] is None
    loss = by_name["int4"]["loss"]
    assert loss["kl"] > 0 and loss["nll_change"] > 0 and 0 <= loss["same_top"] <= 1
    assert sum(position["tokens"] for position in loss["positions"]) == found["tokens"] == 89
    bytes_of = {name: one["cost"]["state_bytes"] for name, one in by_name.items()}
    assert bytes_of["int4:nearest:2:uniform"] < bytes_of["fp32"]
    assert [layer["layer"] for layer in found["layers"]] == [0, 1]
    assert all(layer["kl"] > 0 and layer["half_life_median"] > 0 for layer in found["layers"])


def test_what_is_written_is_what_every_command_then_uses(run, tmp_path, model, capfd):
    status, out, err = run("-o", str(tmp_path / "out"), "--json", "--state-dtype", "int8:outer:4")
    assert status == 0, err
    found = strict(out)
    assert found["output"] == str(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["state_quantization"] == found["state_quantization"]
    assert found["state_quantization"]["outer"] is True
    lm = load_model(tmp_path / "out", device="cpu")
    assert lm.state_dtype == found["state_quantization"]["name"]
    plain = load_model(tmp_path / "out", device="cpu", state_dtype="fp32")
    assert plain.state_dtype == "fp32"
    # The loss that was reported is the loss of what was written.
    ids = torch.tensor(plain.tokenizer.encode(" ".join(map(str, IDS))))
    plan = make_plan([Document(ids, "", False)], plain.tokenizer, "step", 24)
    [again] = measure_losses([lm], plain, plan)
    reported = next(one["loss"] for one in found["formats"] if one["chosen"])
    assert (again.perplexity, again.kl, again.nll_change) == (
        reported["perplexity"],
        reported["kl"],
        reported["nll_change"],
    )
    capfd.readouterr()
    assert main(["inspect", str(tmp_path / "out")]) == 0
    line = "state_quantization\tint8:4:outer; rounding stochastic; written every 4 tokens; heads "
    assert line in capfd.readouterr().out


@pytest.mark.gpu
def test_a_gpu_measures_the_losses_that_the_cpu_does(run):
    found = {}
    for device in ("cpu", "cuda"):
        status, out, err = run("--json", "--device", device)
        assert status == 0, err
        found[device] = strict(out)
    assert found["cuda"]["state_quantization"] == found["cpu"]["state_quantization"]
    for here, there in zip(found["cpu"]["formats"][1:], found["cuda"]["formats"][1:], strict=True):
        assert there["loss"]["nll_change"] == pytest.approx(here["loss"]["nll_change"], rel=0.2)


@pytest.mark.parametrize("config", [hybrid(), MAMBA1], ids=["hybrid", "mamba1"])
def test_hybrids_and_mamba1_are_reported_and_written_too(run, tmp_path, config):
    source = save_model(tmp_path / "model", config)
    status, out, err = run("-o", str(tmp_path / "out"), "--json", model=str(source))
    assert status == 0, err
    found = strict(out)
    assert [layer["heads"] is None for layer in found["layers"]] == [
        index in config.attn_layer_idx for index in range(config.n_layer)
    ]
    assert found["formats"][-1]["loss"]["kl"] > 0
    assert load_model(tmp_path / "out", device="cpu").state_dtype == "int8"


def test_a_recipe_is_followed_head_by_head(run, tmp_path):
    layers = tuple(
        LayerFormat(("int8", "int4", "int8", "fp16"), "nearest", 3, layer_seed(7, index))
        for index in range(2)
    )
    section = write_section(StateFormat(layers=layers, name="mine"))
    (tmp_path / "recipe.json").write_text(json.dumps(section))
    status, out, err = run("--recipe", str(tmp_path / "recipe.json"), "--json")
    assert status == 0, err
    assert strict(out)["state_quantization"] == section
    assert strict(out)["formats"][-1]["name"] == "mine"


@pytest.mark.parametrize("columns", [60, 200])
def test_the_report_fits_a_terminal_of_sixty_columns(run, monkeypatch, columns):
    terminal = Terminal()
    monkeypatch.setenv("COLUMNS", str(columns))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        status = run("--compare", "bf16,int8,fp8,int4", "--state-dtype", "int4")[0]
    assert status == 0
    lines = terminal.getvalue().splitlines()
    assert max(len(line) for line in lines if not line.startswith("text ")) <= 60  # a path is never cut
    assert sum("int4 *" in line for line in lines) == 3


def test_a_target_out_of_reach_fails_with_what_was_reached_and_writes_nothing(run, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "mamba_cli.quantize.study.reach",
        lambda target, make, format, *rest: reach(-0.9, make, format, *rest),
    )
    status, out, err = run("-o", str(tmp_path / "out"), "--target-ppl-increase", "0.1%")
    assert (status, out) == (1, "")
    assert "error: target: expected a perplexity increase of at most 0.1%, got " in err
    assert "with every head of int8 in 16 bits" in err
    assert not (tmp_path / "out").exists()


def test_layers_that_were_widened_for_a_target_are_named_and_written(run, tmp_path, monkeypatch):
    def widen_the_second(target, make, format, layers, lm, plan, progress):
        format = widen(format, 1)
        [loss] = measure_losses([make(format)], lm, plan, progress)
        return Widened(format, loss, (1,), True)

    monkeypatch.setattr("mamba_cli.quantize.study.reach", widen_the_second)
    words = "int4:uniform"
    arguments = ("--state-dtype", words, "--target-ppl-increase", "0.1%", "-o", str(tmp_path / "out"))
    status, out, err = run(*arguments, "--json")
    assert status == 0, err
    found = strict(out)
    assert found["widened_layers"] == [1]
    assert found["state_quantization"]["layers"] == ["int4", "int8"]
    lm = load_model(tmp_path / "out", device="cpu")
    assert lm.state_dtype == found["formats"][-1]["name"] == f"{words}+"


def test_a_target_that_is_met_widens_nothing(run):
    status, out, err = run("--json", "--target-ppl-increase", "50%")
    assert status == 0, err
    assert strict(out)["widened_layers"] == []
    assert strict(out)["state_quantization"]["name"] == "int8"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--state-dtype", "int5"), "error: --state-dtype: expected one of"),
        (("--state-dtype", "fp32"), "error: --state-dtype: expected a format narrower than fp32"),
        (("--compare", "int8,int9"), "error: --compare: expected one of"),
        (("--target-ppl-increase", "0.5"), "error: --target-ppl-increase: expected a percentage as 0.5%"),
        (("--target-ppl-increase", "-1%"), "error: --target-ppl-increase: expected a percentage as 0.5%"),
        (("--recipe", "x.json", "--state-dtype", "int8"), "error: --recipe: expected no --state-dtype"),
        (
            ("--target-ppl-increase", "1%", "--sensitivity-tokens", "0"),
            "error: --sensitivity-tokens: expected some",
        ),
        (("--overwrite",), "error: --overwrite: expected --output OUT beside it, got none"),
        (("--window", "0"), "error: --window: expected a number from 1, got 0"),
    ],
)
def test_wrong_usage_is_told_in_one_line(run, arguments, message):
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith(message)
    assert len(err.splitlines()) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--recipe", "nowhere.json"), "nowhere.json: expected a recipe in JSON, got no such file"),
        (("--plot", "picture.txt"), "plot: expected a file name in .png or .svg"),
        (("--calibrate", "nowhere.txt"), "text: expected"),
        (
            ("--state-dtype", "int8", "-o", "/proc/nothing/here"),
            "/proc/nothing/here: expected a place to write",
        ),
    ],
)
def test_what_cannot_be_is_told_in_one_line(run, arguments, message):
    status, _, err = run(*arguments)
    assert status == 1
    assert f"error: {message}" in err
    assert "Traceback" not in err


def test_a_destination_with_files_is_refused_before_the_work(run, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    status, out, err = run("-o", str(tmp_path / "out"))
    assert (status, out) == (1, "")
    assert "expected a new or empty folder" in err and "--overwrite" in err


def test_a_single_file_is_told_what_to_do(run, tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    status, _, err = run("-o", str(tmp_path / "out"), model=str(tmp_path / "model.gguf"))
    assert status == 1
    assert "expected a folder, whose configuration can carry state_quantization, got one file" in err
    assert "hint: mamba2 convert" in err


def test_the_built_in_text_stands_in_and_is_named(tmp_path, capfd):
    arguments = ["quantize-state", "demo", "--max-tokens", "60", *QUICK, "--json"]
    assert main(arguments) == 0
    out, err = capfd.readouterr()
    assert strict(out)["text"] == "built-in text"
    assert "built-in text: 59 tokens" in err


def test_the_plot_is_written(run, tmp_path):
    pytest.importorskip("matplotlib")
    status, _, err = run("--plot", str(tmp_path / "errors.svg"))
    assert status == 0, err
    assert "int8 (chosen)" in (tmp_path / "errors.svg").read_text()
