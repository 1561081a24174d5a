"""`mamba2 eval-ppl`, run through main() over a small checkpoint on disk."""

import io
import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from checkpoint_testing import save_state_spaces, state_dict
from generation_testing import save_word_level
from mamba_commands.app import main
from model_testing import BASE
from oracle import oracle_logits
from quantize_testing import quantize

ROOT = Path(__file__).parent.parent
IDS = torch.randint(BASE.vocab_size, (70,), generator=torch.Generator().manual_seed(0)).tolist()
TEXT = " ".join(map(str, IDS))


def save_model(folder: Path, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> str:
    """Write a model whose tokenizer reads numbers as ids. scale: of the embedding, which is the head too."""
    tensors = {name: tensor.to(dtype) for name, tensor in state_dict(BASE).items()}
    for name in ("backbone.embedding.weight", "lm_head.weight"):
        tensors[name] = tensors[name] * scale
    save_state_spaces(folder, BASE, tensors)
    save_word_level(folder, [str(number) for number in range(BASE.vocab_size)])
    (folder / "tokenizer_config.json").write_text('{"bos_token": "1", "eos_token": "2"}')
    return str(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def text(tmp_path) -> str:
    (tmp_path / "text.txt").write_text(TEXT)
    return str(tmp_path / "text.txt")


@pytest.fixture
def run(model, capfd):
    """Run `mamba2 eval-ppl ARGUMENTS` and return (status, stdout, stderr)."""

    def run(*arguments: str, model: str = model):
        capfd.readouterr()
        status = main(["eval-ppl", "--model", model, "--device", "cpu", *arguments])
        return status, *capfd.readouterr()

    return run


@pytest.fixture
def result(run):
    """Run `mamba2 eval-ppl ARGUMENTS --json` and return the document, read by a strict parser."""

    def result(*arguments: str, **options):
        def refuse(constant: str) -> None:
            raise ValueError(constant)

        status, out, err = run(*arguments, "--json", **options)
        assert status == 0, err
        return json.loads(out, parse_constant=refuse)

    return result


def oracle_nll(ids: list[int], window: int) -> float:
    total = 0.0
    for start in range(0, len(ids) - 1, window):
        piece = torch.tensor(ids[start : start + window + 1])
        logits = oracle_logits(BASE, state_dict(BASE), piece[None, :-1])[0, :, : BASE.vocab_size]
        total += (logits.logsumexp(-1) - logits.gather(1, piece[1:, None])[:, 0]).sum().item()
    return total


@pytest.mark.parametrize("mode", ["window", "carry", "step"])
def test_the_number_is_the_oracles_in_every_mode(result, text, mode):
    found = result(text, "--mode", mode, "--window", "16")
    expected = oracle_nll(IDS, len(IDS) if mode == "carry" else 16)
    assert found["nll_sum"] == pytest.approx(expected, rel=1e-5)
    assert found["tokens"] == 69
    assert found["perplexity"] == pytest.approx(math.exp(expected / 69), rel=1e-5)


def test_the_result_says_what_was_measured(result, text, model):
    found = result(text, "--window", "16", "--stride", "4", "--prefix", "eos", "--max-tokens", "50")
    expected = {
        "unit": "token",
        "text": text,
        "joining": "one text",
        "documents": 1,
        "tokens": 50,
        "text_tokens": 50,
        "words": 50,
        "bytes": len(" ".join(map(str, IDS[:50]))),
        "mode": "window",
        "window": 16,
        "stride": 4,
        "prefix": "eos",
        "prefix_token_id": 2,
        "stderr_method": "delta method over windows",
        "model": model,
        "dtype": "float32",
        "device": "cpu",
        "backend": "torch",
        "processes": 1,
    }
    assert {name: found[name] for name in expected} == expected
    assert found["tokens_per_second"] > 0


def test_without_options_the_window_and_the_stride_are_2048(result, text):
    found = result(text)
    assert (found["mode"], found["window"], found["stride"], found["prefix"]) == (
        "window",
        2048,
        2048,
        "none",
    )


def test_quiet_prints_exactly_one_number(run, result, text):
    status, out, err = run(text, "-q")
    assert (status, err) == (0, "")
    assert float(out) == result(text)["perplexity"]
    assert out.count("\n") == 1


def test_tables_are_tab_separated_when_piped_and_hold_the_definition(run, text):
    status, out, err = run(text, "--by-position", "--prefix", "bos")
    lines = [line.split("\t") for line in out.splitlines() if line]
    assert status == 0
    assert lines[0] == ["figure", "value", "+-"]
    assert ["tokens read", "scored", "perplexity"] in lines
    assert ["prefix_token_id", "1"] in lines
    assert "tokens/s" in err
    assert "█" not in out


def test_positions_are_bars_on_a_terminal(run, text, monkeypatch):
    monkeypatch.setattr("mamba_commands.eval_ppl_tables.is_terminal", lambda stream: True)
    _, out, _ = run(text, "--by-position")
    assert "█" * 40 in out


def test_positions_of_infinite_perplexity_fill_their_bars(run, text, tmp_path, monkeypatch):
    monkeypatch.setattr("mamba_commands.eval_ppl_tables.is_terminal", lambda stream: True)
    status, out, _ = run(text, "--by-position", model=save_model(tmp_path / "huge", scale=1e5))
    assert status == 0
    assert "inf" in out


def test_documents_are_scored_alone(result, tmp_path):
    rows = [TEXT[:40].strip(), "5", "", TEXT[40:].strip()]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps({"body": row}) for row in rows))
    found = result(str(file), "--field", "body", "--documents", "--window", "16")
    ids = [[int(word) for word in row.split()] for row in rows]
    assert found["nll_sum"] == pytest.approx(sum(oracle_nll(each, 16) for each in ids), rel=1e-5)
    assert (found["documents"], found["joining"]) == (2, "a document a row")
    together = result(str(file), "--field", "body", "--window", "16")
    assert together["nll_sum"] == pytest.approx(oracle_nll([i for each in ids for i in each], 16), rel=1e-5)


def test_standard_input_is_a_text(result, monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(TEXT.encode()), isatty=lambda: False))
    assert result("-", "--window", "16")["nll_sum"] == pytest.approx(oracle_nll(IDS, 16), rel=1e-5)


@pytest.mark.parametrize("batch", ["1", "8", "auto"])
def test_the_batch_size_does_not_change_the_number(result, text, batch):
    found = result(text, "--window", "16", "--stride", "8", "--batch-size", batch)
    assert found["perplexity"] == pytest.approx(result(text, "--window", "16", "--stride", "8")["perplexity"])


@pytest.mark.parametrize("reference", ["bfloat16", "float64", "copy"])
def test_a_reference_is_a_dtype_or_a_model(result, run, text, tmp_path, reference):
    name = save_model(tmp_path / "copy") if reference == "copy" else reference
    found = result(text, "--reference", name, "--by-position", "--window", "16")
    compared = found["reference"]
    assert compared["dtype"] == ("float32" if reference == "copy" else reference)
    assert set(compared["kl_percentiles"]) >= {"50", "99.9", "100"}
    assert compared["nll_difference"] == pytest.approx(found["nll_mean"] - compared["nll_mean"], abs=1e-9)
    assert "reference_perplexity" in found["by_position"][0]
    if reference == "copy":
        assert (compared["kl_mean"], compared["same_top"], compared["nll_difference"]) == (0, 1, 0)
    else:
        assert 0 < compared["kl_mean"] < 1e-2
    assert "same top-1" in run(text, "--reference", name)[1]


def test_a_perplexity_past_every_float_is_inf_and_null_and_its_nll_is_still_there(
    run, result, text, tmp_path
):
    huge = save_model(tmp_path / "huge", scale=1e5)
    found = result(text, model=huge)
    assert found["perplexity"] is None
    assert found["nll_mean"] > 710
    assert run(text, "-q", model=huge)[1] == "inf\n"
    assert "perplexity\tinf" in run(text, model=huge)[1]


def test_nan_logits_are_an_error_and_no_number(run, text, tmp_path):
    status, out, err = run(text, "--json", model=save_model(tmp_path / "nan", scale=math.nan))
    assert (status, out) == (1, "")
    assert err.startswith("error: logits: expected numbers, got NaN where token 1 of document 0 is predicted")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "a.txt: expected at least 2 tokens, one to read and one to predict, got 0"),
        (b"7", "a.txt: expected at least 2 tokens, one to read and one to predict, got 1"),
        (b"\xff\xfe1\x00", "expected UTF-8 text, got byte 0xff at offset 0"),
    ],
)
def test_a_text_with_nothing_to_score_is_one_clear_error(run, tmp_path, content, message):
    (tmp_path / "a.txt").write_bytes(content)
    status, out, err = run(str(tmp_path / "a.txt"), "--json")
    assert (status, out) == (1, "")
    assert err.startswith(f"error: {tmp_path / 'a.txt'}: ") and message in err
    assert "Traceback" not in err


def test_documents_too_short_to_score_are_told_from_a_short_text(run, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "7"}\n' * 5)
    status, _, err = run(str(tmp_path / "a.jsonl"), "--documents")
    assert status == 1
    assert "a.jsonl: expected at least 2 tokens, one to read and one to predict, got at most 1 in each" in err


def test_a_tokenizer_past_the_models_vocabulary_is_an_error_with_both_numbers(run, text, tmp_path):
    save_word_level(tmp_path / "other", [str(number) for number in range(BASE.vocab_size + 5)])
    status, _, err = run(text, "--tokenizer", str(tmp_path / "other"))
    assert status == 1
    assert str(BASE.vocab_size) in err and str(BASE.vocab_size + 4) in err


@pytest.mark.parametrize(
    "arguments",
    [
        ("--window", "8", "--stride", "9"),
        ("--mode", "carry", "--stride", "4"),
        ("--mode", "chunk"),
        ("--prefix", "pad"),
        ("--batch-size", "0"),
        ("--batch-size", "many"),
        ("--batch-size", "9" * 10),
        ("--batch-size", "9" * 5000),
        ("--max-tokens", "0"),
        ("--window", "0"),
    ],
)
def test_wrong_usage_exits_2_with_one_line(run, text, arguments):
    status, out, err = run(text, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("error: ") and "Traceback" not in err


def test_a_reference_in_another_format_has_the_column_scales_of_the_model(result, text, tmp_path):
    source = save_model(tmp_path / "plain")
    quantize(Path(source), tmp_path / "outer", outer=True)
    found = result(text, "--reference", "int8:outer", "--mode", "step", model=str(tmp_path / "outer"))
    assert found["reference"]["state_dtype"] == "int8:outer" and found["reference"]["kl_mean"] > 0


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        (
            "int9",
            "expected a dtype (float32, bfloat16, float16, float64), a format of the state (fp32, bf16, "
            "fp16, int8, fp8, int4) or a model (a folder or owner/name), got int9",
        ),
        (
            "int8:nerest",
            "expected nearest, stochastic, a window from 1 to 64, outer or uniform after int8:, got 'nerest'",
        ),
        ("no/such/folder", "or a model (a folder or owner/name), got no/such/folder"),
    ],
)
def test_a_reference_that_is_nothing_known_is_refused_with_what_is_known(run, reference, message):
    status, out, err = run("no-such-text.txt", "--reference", reference)
    assert (status, out) == (2, "")
    assert err.startswith("error: --reference: ") and message in err


@pytest.mark.parametrize(("name", "magic"), [("a.png", b"\x89PNG"), ("b.svg", b"<?xml")])
def test_a_plot_is_written_whole(run, text, tmp_path, name, magic):
    pytest.importorskip("matplotlib")
    folder = tmp_path / "plots"
    folder.mkdir()
    assert run(text, "--plot", str(folder / name), "--reference", "bfloat16")[0] == 0
    assert (folder / name).read_bytes().startswith(magic)
    assert [path.name for path in folder.iterdir()] == [name]


def test_a_plot_that_cannot_be_is_refused_before_the_measurement(run, text, tmp_path, monkeypatch):
    assert "in .png or .svg, got" in run(text, "--plot", str(tmp_path / "a.jpg"))[2]
    assert "expected an existing folder" in run(text, "--plot", str(tmp_path / "none" / "a.png"))[2]
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, out, err = run(text, "--plot", str(tmp_path / "a.png"))
    assert (status, out) == (1, "")
    assert "hint: pip install matplotlib" in err


def test_a_finished_resume_file_gives_the_same_number_again(result, text, tmp_path):
    file = str(tmp_path / "run.resume")
    whole = result(text, "--window", "16")
    for _ in range(2):
        assert result(text, "--window", "16", "--resume", file)["nll_sum"] == whole["nll_sum"]


def run_processes(count: int, *arguments: str) -> list[subprocess.CompletedProcess]:
    """Run `mamba2 ARGUMENTS` in processes that find each other by torchrun's environment variables."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mamba_commands.app", *arguments]
    path = os.pathsep.join(map(str, (ROOT, ROOT / "commands", ROOT / "kernels")))
    running = []
    for rank in range(count):
        environment = os.environ | {
            "PYTHONPATH": path,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        running.append(subprocess.Popen(command, env=environment, **pipes))
    results = []
    for process in running:
        out, err = process.communicate(timeout=120)
        results.append(subprocess.CompletedProcess(command, process.returncode, out, err))
    return results


def test_two_processes_give_the_number_of_one_and_print_it_once(result, text, model, tmp_path):
    arguments = (text, "--window", "8", "--stride", "6", "--batch-size", "2", "--reference", "bfloat16")
    alone = result(*arguments)
    resume = ("--resume", str(tmp_path / "run.resume"))
    first, second = run_processes(
        2, "eval-ppl", *arguments, *resume, "--model", model, "--device", "cpu", "--json"
    )
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert second.stdout == ""
    together = json.loads(first.stdout)
    assert together["processes"] == 2
    for name in ("nll_sum", "perplexity", "nll_stderr", "tokens", "batch_size"):
        assert together[name] == alone[name]
    assert together["reference"] == alone["reference"]
    # What two processes kept, one continues.
    assert result(*arguments, *resume)["nll_sum"] == alone["nll_sum"]


@pytest.mark.parametrize("state_dtype", ["int4", "bf16", "fp32"])
@pytest.mark.parametrize("mode", ["window", "carry", "step"])
def test_a_mode_that_hardly_rounds_a_narrow_state_says_so(run, text, mode, state_dtype):
    status, _, err = run(text, "--mode", mode, "--state-dtype", state_dtype)
    assert status == 0, err
    assert ("--mode step rounds it as decoding does" in err) == (mode != "step" and state_dtype != "fp32")
