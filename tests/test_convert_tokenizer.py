"""A tokenizer goes along with the weights."""

from checkpoint_testing import strict_json
from convert_testing import contents, message, word_tokenizer
from mamba_cli.convert import convert


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
