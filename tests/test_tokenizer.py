"""mamba_cli.tokenizer: text survives, whole or streamed, and the right files and ids are found."""

import json
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from generation_testing import (
    END,
    byte_level,
    checkpoint,
    save_byte_fallback,
    save_byte_level_bpe,
    save_word_level,
)
from mamba_cli.errors import Mamba2Error
from mamba_cli.tokenizer import TextStream, Tokenizer, load_tokenizer

TEXTS = [
    "",
    " ",
    "  a",
    "a ",
    "\n\n",
    "\t\r\n x",
    " of 'sensing things",
    "x != y",
    "it's , and . it ' s",
    "é🙂",
    "你好, naïve café",
    f"before{END}after",
    "▁mark",
    "\ufffd",
    "\x00\x7f",
    "👨‍👩‍👧‍👦 family",
    "Once upon a time",
    "don't  do   that",
    "<s> </s> <pad>",
    "ﬁ ½ Å",
]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory) -> Tokenizer:
    return byte_level(tmp_path_factory.mktemp("bpe"))


def streamed(stream: TextStream, ids: list[int]) -> list[str]:
    return [*(stream.push(token_id) for token_id in ids), stream.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_decoding_gives_the_encoded_text_back(bpe, text):
    assert bpe.decode(bpe.encode(text)) == text


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text())
def test_streamed_text_is_the_whole_text(bpe, text):
    ids = bpe.encode(text)
    assert bpe.decode(ids) == text
    assert "".join(streamed(bpe.stream(), ids)) == text


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 399), max_size=30))
def test_streamed_text_of_any_ids_is_their_whole_text(bpe, ids):
    parts = streamed(bpe.stream(), ids)
    assert "".join(parts) == bpe.decode(ids)
    for part in parts:
        part.encode("utf-8")


def test_a_character_appears_once_all_its_bytes_are_there(bpe):
    ids = bpe.encode("𐍈")
    assert len(ids) == 4
    assert streamed(bpe.stream(), ids) == ["", "", "", "𐍈", ""]


def test_half_a_character_at_the_end_becomes_a_replacement_character(bpe):
    ids = bpe.encode("a𐍈")[:-1]
    assert streamed(bpe.stream(), ids) == ["a", "", "", "", "\ufffd"]


def test_the_stream_knows_what_comes_before(tmp_path):
    words = load_tokenizer(checkpoint(save_word_level(tmp_path, ["<unk>", "the", "old", "sea"]), 4))
    assert words.decode([1, 2, 3]) == "the old sea"
    assert streamed(words.stream(), [1, 2, 3]) == ["the", " old", " sea", ""]
    assert streamed(words.stream([1]), [2, 3]) == [" old", " sea", ""]


def test_byte_fallback_tokenizers_stream_characters(tmp_path):
    tokenizer = load_tokenizer(checkpoint(save_byte_fallback(tmp_path), 286))
    text = "the é fox 👩 é"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert "".join(streamed(tokenizer.stream(), ids)) == text
    for split in range(len(text)):
        context = tokenizer.encode(text[:split])
        parts = streamed(tokenizer.stream(context), ids[len(context) :])
        assert text[:split] + "".join(parts) == text
        assert not any("\ufffd" in part for part in parts)


def test_streaming_a_long_text_decodes_a_short_window_each_time(bpe, monkeypatch):
    longest = 0
    decode = bpe._backend.decode

    def measured(ids):
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids)

    monkeypatch.setattr(bpe._backend, "decode", measured)
    streamed(bpe.stream(), bpe.encode("the fox said: 🙂 " * 200))
    assert longest < 12


def test_encoding_adds_no_special_tokens_and_does_not_truncate(tmp_path):
    file = save_byte_level_bpe(tmp_path) / "tokenizer.json"
    document = json.loads(file.read_text())
    document["truncation"] = {
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
        "direction": "Right",
    }
    document["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": END,
        "pad_to_multiple_of": None,
    }
    document["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": END, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [],
        "special_tokens": {END: {"id": END, "ids": [0], "tokens": [END]}},
    }
    file.write_text(json.dumps(document))
    tokenizer = load_tokenizer(checkpoint(tmp_path, 400))
    text = "Once upon a time there was a fox"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_added_tokens_that_the_model_lacks_are_plain_text(tmp_path):
    file = save_byte_level_bpe(tmp_path) / "tokenizer.json"
    document = json.loads(file.read_text())
    size = len(document["model"]["vocab"])
    document["added_tokens"].append(dict(document["added_tokens"][0], id=size, content="<|im_start|>"))
    file.write_text(json.dumps(document))
    text = "say <|im_start|> twice"
    larger, smaller = (load_tokenizer(checkpoint(tmp_path, size + extra)) for extra in (1, 0))
    assert size in larger.encode(text) and larger.vocab_size == size + 1
    assert max(smaller.encode(text)) < size and smaller.vocab_size == size
    assert smaller.decode(smaller.encode(text)) == text


def test_a_tokenizer_too_large_for_the_model_is_refused_with_both_numbers(tmp_path):
    size = byte_level(tmp_path).vocab_size
    with pytest.raises(Mamba2Error, match=f"vocab_size 300, got {size - 1}") as caught:
        load_tokenizer(checkpoint(tmp_path, 300))
    assert "--tokenizer" in caught.value.hint


def write(folder, name, document):
    (folder / name).write_text(json.dumps(document))


def special(folder, **ids):
    tokenizer = load_tokenizer(checkpoint(folder, 400, **ids))
    return tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id


def test_special_ids_come_from_the_tokenizers_files_before_the_models(tmp_path):
    save_byte_level_bpe(tmp_path)
    assert special(tmp_path) == (None, 0, None)  # by the name of the end-of-text token
    config = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}
    assert special(tmp_path, **config) == (1, 2, 3)
    write(tmp_path, "generation_config.json", {"bos_token_id": 4, "eos_token_id": [5, 6]})
    assert special(tmp_path, **config) == (4, 5, 3)
    write(tmp_path, "special_tokens_map.json", {"bos_token": "!", "eos_token": {"content": "#"}})
    assert special(tmp_path, **config) == (
        *(load_tokenizer(checkpoint(tmp_path, 400)).encode(mark)[0] for mark in "!#"),
        3,
    )
    write(tmp_path, "tokenizer_config.json", {"bos_token": None, "eos_token": END, "pad_token": "no such"})
    assert special(tmp_path, **config)[1:] == (0, 3)


def test_ids_outside_the_vocabulary_and_broken_files_are_passed_over(tmp_path):
    save_byte_level_bpe(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{broken")
    write(
        tmp_path, "generation_config.json", {"eos_token_id": 99999, "bos_token_id": "<s>", "pad_token_id": []}
    )
    assert special(tmp_path) == (None, 0, None)


def test_a_source_may_be_a_folder_or_a_file(tmp_path):
    source = save_byte_level_bpe(tmp_path / "tokenizer")
    model = checkpoint(tmp_path, 400)
    for path in (source, source / "tokenizer.json"):
        assert load_tokenizer(model, str(path)).encode("a fox")


@pytest.mark.parametrize("vocab_size", [400, 32000, 50276, 51200])
def test_no_default_tokenizer_for_a_vocabulary_of_another_size(tmp_path, vocab_size):
    with pytest.raises(Mamba2Error, match=r"expected tokenizer\.json or tokenizer\.model in") as caught:
        load_tokenizer(checkpoint(tmp_path, vocab_size))
    assert "--tokenizer" in caught.value.hint


@pytest.mark.parametrize("vocab_size", [50277, 50280, 50288])
def test_the_default_tokenizer_offline_names_the_command_that_fetches_it(tmp_path, vocab_size):
    code = f"""
from pathlib import Path
from generation_testing import checkpoint
from mamba_cli.errors import Mamba2Error
from mamba_cli.tokenizer import load_tokenizer
try:
    load_tokenizer(checkpoint(Path({str(tmp_path)!r}), {vocab_size}))
except Mamba2Error as error:
    print(error.message, error.hint, sep="\\n")
"""
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    message, hint = ran.stdout.splitlines()
    assert "EleutherAI/gpt-neox-20b" in message
    assert hint.startswith("hf download EleutherAI/gpt-neox-20b tokenizer.json")


@pytest.mark.parametrize("source", ["no-such", "../no/such", "/no/such", ""])
def test_a_source_that_is_neither_there_nor_a_repo_is_named(tmp_path, source):
    with pytest.raises(Mamba2Error, match="tokenizer: expected"):
        load_tokenizer(checkpoint(tmp_path, 400), source)


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(Mamba2Error, match=r"tokenizer: expected .* in .*, got neither"):
        load_tokenizer(checkpoint(tmp_path, 50277), str(tmp_path))


@pytest.mark.parametrize("content", ["", "version https://git-lfs.github.com/spec/v1\noid", "{}", "[1]"])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(Mamba2Error, match=r"tokenizer\.json: expected a tokenizer, got"):
        load_tokenizer(checkpoint(tmp_path, 400))


def test_a_folder_with_vocab_and_merges_is_read_by_transformers(tmp_path):
    bpe = byte_level(tmp_path / "fast")
    document = json.loads((tmp_path / "fast" / "tokenizer.json").read_text())["model"]
    folder = tmp_path / "slow"
    folder.mkdir()
    write(folder, "vocab.json", document["vocab"])
    pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in document["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(pairs) + "\n")
    write(folder, "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer", "eos_token": END})
    slow = load_tokenizer(checkpoint(folder, 400))
    for text in TEXTS:
        assert slow.encode(text) == bpe.encode(text)
        assert slow.decode(slow.encode(text)) == text
    assert slow.eos_id == 0
    assert "".join(streamed(slow.stream(), slow.encode("é🙂 it's ."))) == "é🙂 it's ."


def test_a_sentencepiece_model_without_its_package_names_the_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    (tmp_path / "tokenizer.model.v3").write_bytes(b"\n")
    with pytest.raises(Mamba2Error, match="sentencepiece") as caught:
        load_tokenizer(checkpoint(tmp_path, 400))
    assert caught.value.hint == "pip install sentencepiece"
