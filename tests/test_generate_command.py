"""`mamba2 generate`, run through main() over a model without layers."""

import io
import json
import os
import re
import sys
from types import SimpleNamespace

import pytest

import mamba_cli
from generation_testing import byte_level, checkpoint, markov, save_word_level, scripted
from mamba_cli.tokenizer import Tokenizer, load_tokenizer
from mamba_commands.app import main

PROMPT = "the fox"
SAID = " liked the sea. 🙂 [/INST] [bold]x[/bold]"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def bpe(tmp_path_factory) -> Tokenizer:
    return byte_level(tmp_path_factory.mktemp("bpe"))


@pytest.fixture
def loaded(bpe, monkeypatch) -> SimpleNamespace:
    """Replace load_model; the test may set .model, and finds what was asked for in .asked."""
    loaded = SimpleNamespace(model=scripted(bpe, len(bpe.encode(PROMPT)), bpe.encode(SAID)), asked=None)

    def load_model(model, device, dtype, **options):
        loaded.asked = {"model": model, "device": device, "dtype": dtype} | options
        return loaded.model

    # Not setattr, which looks at the old value: it is imported when looked at.
    monkeypatch.setitem(vars(mamba_cli), "load_model", load_model)
    monkeypatch.delenv("MAMBA2_MODEL", raising=False)
    monkeypatch.setattr(sys, "stdin", Terminal())
    return loaded


@pytest.fixture
def run(loaded, capfd, monkeypatch):
    """Run `mamba2 generate ARGUMENTS`, with `piped` as stdin, and return (status, stdout, stderr)."""

    def run(*arguments: str, piped: bytes | None = None):
        if piped is not None:
            monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(piped), isatty=lambda: False))
        capfd.readouterr()
        status = main(["generate", "--temperature", "0", *arguments])
        return status, *capfd.readouterr()

    return run


def test_the_text_goes_to_stdout_as_it_is_and_the_figures_to_stderr(run):
    status, out, err = run("--prompt", PROMPT, "--model", "x")
    assert (status, out) == (0, SAID + "\n")
    assert re.fullmatch(
        r"prompt \d+ tok, \d+ tok/s; generated \d+ tok, [\d.]+ tok/s; torch on cpu in float32; seed \d+\n",
        err,
    )


def test_quiet_says_nothing_on_stderr(run):
    assert run("--prompt", PROMPT, "-q") == (0, SAID + "\n", "")


def test_verbose_says_what_runs_before_the_text(run):
    _, _, err = run("--prompt", PROMPT, "--model", "x", "-v")
    assert err.splitlines()[0] == "stub: torch on cpu in float32, state in fp32"


def test_echo_writes_the_prompt_before_the_text(run):
    assert run("--prompt", PROMPT, "--echo")[1] == PROMPT + SAID + "\n"
    assert json.loads(run("--prompt", PROMPT, "--echo", "--json")[1])["text"] == PROMPT + SAID


@pytest.mark.parametrize("ending", ["", "\n"])
def test_the_prompt_may_be_piped_in_less_the_newline_at_its_end(run, ending):
    piped = (PROMPT + ending).encode()
    assert run(piped=piped)[1] == SAID + "\n"
    assert run("--prompt", "-", piped=piped)[1] == SAID + "\n"
    assert run("--prompt-file", "-", piped=piped)[1] == SAID + "\n"


def test_the_prompt_may_come_from_a_file(run, tmp_path):
    (tmp_path / "prompt.txt").write_text(PROMPT + "\n")
    assert run("--prompt-file", str(tmp_path / "prompt.txt"))[1] == SAID + "\n"


def test_a_prompt_given_leaves_the_pipe_alone(run):
    assert run("--prompt", PROMPT, piped=b"something else")[1] == SAID + "\n"


def test_only_one_newline_is_taken_off_a_prompt(run, loaded, bpe):
    loaded.model = scripted(bpe, len(bpe.encode(PROMPT + "\r\n\n")), bpe.encode(SAID))
    assert run("--echo", piped=(PROMPT + "\r\n\n\n").encode())[1] == PROMPT + "\r\n\n" + SAID + "\n"


@pytest.mark.parametrize("arguments", [(), ("--prompt", "")])
def test_an_empty_prompt_starts_from_the_end_of_text_token(run, loaded, bpe, arguments):
    loaded.model = scripted(bpe, 1, bpe.encode(SAID))
    status, out, err = run(*arguments, "--json")
    assert (status, json.loads(out)["text"], json.loads(out)["prompt_tokens"]) == (0, SAID, 1)
    assert ("no prompt" in err) == (not arguments)


def test_an_empty_prompt_needs_a_token_to_start_from(run, loaded, tmp_path):
    words = load_tokenizer(checkpoint(save_word_level(tmp_path, ["<unk>", "sea"]), 2))
    loaded.model = markov(words)
    status, out, err = run("--prompt", "")
    assert (status, out) == (1, "")
    assert "error: prompt: expected a text, as the tokenizer has no BOS or EOS token, got none\n" in err


def test_no_new_tokens_prints_only_what_was_asked_for(run):
    assert run("--prompt", PROMPT, "--max-new-tokens", "0")[:2] == (0, "")
    assert run("--prompt", PROMPT, "--max-new-tokens", "0", "--echo")[:2] == (0, PROMPT + "\n")
    document = json.loads(run("--prompt", PROMPT, "--max-new-tokens", "0", "--json")[1])
    assert (document["text"], document["token_ids"], document["finish_reason"]) == ("", [], "length")
    assert document["decode_tokens_per_second"] is None


def test_json_is_one_document_with_the_figures(run, bpe):
    status, out, _ = run("--prompt", PROMPT, "--json", "--seed", "5")
    document = json.loads(out)
    rates = document.pop("prefill_tokens_per_second"), document.pop("decode_tokens_per_second")
    assert min(rates) > 0
    ids = [*bpe.encode(SAID), 0]
    assert (status, document) == (
        0,
        {
            "text": SAID,
            "token_ids": ids,
            "finish_reason": "eos",
            "prompt_tokens": len(bpe.encode(PROMPT)),
            "generated_tokens": len(ids),
            "model": "stub",
            "backend": "torch",
            "device": "cpu",
            "dtype": "float32",
            "state_dtype": "fp32",
            "seed": 5,
        },
    )


def test_several_samples_lie_under_samples(run, loaded, bpe):
    loaded.model = markov(bpe)
    arguments = ("--prompt", PROMPT, "--temperature", "1", "--seed", "2", "-n", "8", "--ignore-eos")
    document = json.loads(run(*arguments, "--num-samples", "3", "--json")[1])
    assert len(document["samples"]) == 3 and "text" not in document
    assert document["generated_tokens"] == 24
    first = json.loads(run(*arguments, "--json")[1])
    assert document["samples"][0] == {key: first[key] for key in document["samples"][0]}
    texts = [sample["text"] for sample in document["samples"]]
    out = run(*arguments, "--num-samples", "3")[1]
    assert out == "\n".join(f"==> {i} of 3 <==\n{text}\n" for i, text in enumerate(texts, 1))


def test_without_a_seed_texts_differ_and_the_seed_that_is_printed_repeats_them(run, loaded, bpe):
    loaded.model = markov(bpe)
    arguments = ("--prompt", PROMPT, "--temperature", "1", "--json")
    one, two = (json.loads(run(*arguments)[1]) for _ in range(2))
    assert one["text"] != two["text"]
    assert json.loads(run(*arguments, "--seed", str(one["seed"]))[1])["text"] == one["text"]


@pytest.mark.parametrize(("terminal", "written"), [(True, " liked\n"), (False, " liked")])
def test_an_interrupted_text_ends_its_line_on_a_terminal(run, monkeypatch, terminal, written):
    def interrupted(*arguments, **options):
        yield SimpleNamespace(text=" liked")
        raise KeyboardInterrupt

    stdout = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr("mamba_cli.generation.generate", interrupted)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        assert run("--prompt", PROMPT)[0] == 130
    assert stdout.getvalue() == written


def test_stops_end_the_text(run):
    arguments = ("--prompt", PROMPT, "--stop", "sea", "--stop", "🙂")
    assert run(*arguments)[1] == " liked the \n"
    assert json.loads(run(*arguments, "--json")[1])["finish_reason"] == "stop"


def test_without_a_model_the_demo_runs_and_a_note_names_a_real_one(run, loaded):
    _, _, err = run("--prompt", PROMPT)
    assert loaded.asked["model"] == "demo"
    assert [line for line in err.splitlines() if "--model state-spaces/mamba2-130m" in line] == [
        "note: using the small demo model; for a real one: --model state-spaces/mamba2-130m"
    ]


def test_the_model_is_taken_from_the_option_then_the_environment(run, loaded, monkeypatch):
    monkeypatch.setenv("MAMBA2_MODEL", "from/environment")
    _, _, err = run("--prompt", PROMPT)
    assert loaded.asked["model"] == "from/environment" and "demo" not in err
    _, _, err = run("--prompt", PROMPT, "--model", "demo")
    assert loaded.asked["model"] == "demo" and "state-spaces" not in err
    monkeypatch.setenv("MAMBA2_MODEL", "")
    run("--prompt", PROMPT)
    assert loaded.asked["model"] == "demo"


def test_options_of_the_model_reach_the_loader(run, loaded):
    run(
        *("--prompt", PROMPT, "-m", "a/b", "--revision", "v1", "--device", "cpu", "--dtype", "bfloat16"),
        *("--backend", "torch", "--tokenizer", "c/d", "--state-dtype", "int8"),
    )
    assert loaded.asked == {
        "model": "a/b",
        "revision": "v1",
        "device": "cpu",
        "dtype": "bfloat16",
        "backend": "torch",
        "tokenizer": "c/d",
        "state_dtype": "int8",
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--temperature", "-1"), "--temperature: expected 0 or a positive number, got -1.0"),
        (("--temperature", "nan"), "--temperature: expected 0 or a positive number, got nan"),
        (("--top-k", "-1"), "--top-k: expected 0 or a positive integer, got -1"),
        (("--top-p", "0"), "--top-p: expected a number above 0 and at most 1, got 0.0"),
        (("--min-p", "2"), "--min-p: expected a number from 0 to 1, got 2.0"),
        (("--repetition-penalty", "0"), "--repetition-penalty: expected a number above 0, got 0.0"),
        (("--stop", ""), "--stop: expected a text, got an empty one"),
        (("--prompt-file", "x"), "--prompt: expected no --prompt-file beside it, got both"),
        (("--max-new-tokens", "-1"), "--max-new-tokens"),
        (("--max-new-tokens", "many"), "--max-new-tokens"),
        (("--num-samples", "0"), "--num-samples"),
        (("--dtype", "int4"), "--dtype"),
        (("--backend", "cuda"), "--backend"),
    ],
)
def test_wrong_values_are_wrong_usage_and_named(run, loaded, arguments, message):
    status, out, err = run("--prompt", PROMPT, *arguments)
    assert (status, out) == (2, "")
    first, second = err.splitlines()
    assert first == f"error: {message}" if ": " in message else message in first
    assert second == "hint: see mamba2 generate --help"
    assert loaded.asked is None


def test_temperature_zero_and_top_k_beyond_the_vocabulary_are_fine(run):
    assert run("--prompt", PROMPT, "--top-k", "1000000")[0] == 0
    assert run("--prompt", PROMPT, "--top-k", "0", "--temperature", "0")[0] == 0


def test_a_prompt_that_is_not_text_is_one_line_with_the_place(run):
    status, out, err = run(piped=b"abc\xff")
    assert (status, out) == (1, "")
    assert err == "error: standard input: expected UTF-8 text, got byte 0xff at 3\n"


def test_a_prompt_on_the_command_line_that_is_not_text_is_one_line(run):
    status, out, err = run("--prompt", os.fsdecode(b"abc\xff"))
    assert (status, out) == (1, "")
    assert err == "error: --prompt: expected UTF-8 text, got byte 0xff at 3\n"


def test_a_missing_prompt_file_is_one_line_with_its_name(run):
    status, out, err = run("--prompt-file", "no/such.txt")
    assert (status, out, err) == (1, "", "error: no/such.txt: No such file or directory\n")
