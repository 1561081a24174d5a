"""What a text is: files, standard input, rows and documents, and the errors for what is none."""

import io
import json
import os
import threading

import pyarrow
import pyarrow.parquet
import pytest

from mamba_cli.errors import Mamba2Error
from mamba_cli.perplexity.texts import Text, read_text

WIKI_ROWS = [
    "",
    " = First = \n",
    "",
    " A line . \n",
    " = = Part = = \n",
    " = Second ( film ) = \n",
    " B . \n",
]


def rows(tmp_path, name, content, field="text"):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_text(str(path), field).rows


def test_a_text_file_is_read_to_the_byte(tmp_path):
    assert rows(tmp_path, "a.txt", b"one\r\n\ttwo \xc3\xa9\n\n") == ["one\r\n\ttwo é\n\n"]
    assert rows(tmp_path, "a.unknown", "x") == ["x"]
    assert rows(tmp_path, "empty.txt", b"") == [""]


def test_a_byte_order_mark_is_no_text(tmp_path):
    assert rows(tmp_path, "a.txt", b"\xef\xbb\xbfone") == ["one"]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_another_encoding_is_an_error_that_names_the_byte(tmp_path, name):
    with pytest.raises(Mamba2Error, match="expected UTF-8 text, got byte 0xe9 at offset 3") as error:
        rows(tmp_path, name, b"caf\xe9")
    assert "iconv" in error.value.hint


def test_standard_input(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("é\r\n".encode()), encoding="ascii"))
    assert read_text("-").rows == ["é\r\n"]


def test_a_pipe_with_a_name_is_read_as_a_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=["one"])
    writer.start()
    assert read_text(str(tmp_path / "pipe")).rows == ["one"]
    writer.join()


def test_jsonl_rows_are_the_values_of_one_field(tmp_path):
    lines = [json.dumps({"text": "a\u2028b\nc", "title": "x"}), "", json.dumps({"text": "d", "title": "y"})]
    assert rows(tmp_path, "a.jsonl", "\n".join(lines)) == ["a\u2028b\nc", "d"]
    assert rows(tmp_path, "a.jsonl", "\n".join(lines), field="title") == ["x", "y"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\n{"body": "b"}', r"a.jsonl:2: expected .* under 'text', got keys body"),
        ('{"text": 3}', "under 'text', got int there"),
        ("[1]", "got list"),
        ('{"text": "a"', "expected one JSON object a line"),
        ('{"text": "\\ud800"}', "a.jsonl:1: expected Unicode, got half a surrogate pair"),
    ],
)
def test_a_row_without_text_is_an_error_that_names_its_line(tmp_path, content, message):
    with pytest.raises(Mamba2Error, match=message):
        rows(tmp_path, "a.jsonl", content)


def write_parquet(path, **columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def test_parquet_rows_are_one_column(tmp_path):
    write_parquet(tmp_path / "a.parquet", text=["one", "", None], title=["x", "y", "z"])
    assert read_text(str(tmp_path / "a.parquet")).rows == ["one", "", ""]
    assert read_text(str(tmp_path / "a.parquet"), "title").rows == ["x", "y", "z"]


def test_parquet_without_the_column_or_with_numbers_in_it_is_an_error(tmp_path):
    write_parquet(tmp_path / "a.parquet", number=[1, 2])
    with pytest.raises(Mamba2Error, match="expected a column 'text', got number"):
        read_text(str(tmp_path / "a.parquet"))
    with pytest.raises(Mamba2Error, match="expected strings in column 'number', got int64"):
        read_text(str(tmp_path / "a.parquet"), "number")
    (tmp_path / "b.parquet").write_text("no parquet")
    with pytest.raises(Mamba2Error, match="expected a parquet file"):
        read_text(str(tmp_path / "b.parquet"))


def test_what_is_neither_name_nor_file_nor_data_set_is_an_error(tmp_path):
    for name in ("wikitxt", "owner/name:config:split:more"):
        with pytest.raises(Mamba2Error, match=r"expected wikitext, .*none of them"):
            read_text(name)
    with pytest.raises(Mamba2Error, match="got the folder"):
        read_text(str(tmp_path))


@pytest.mark.parametrize(
    "name", ["missing.txt", "book.md", "missing/file.txt", "a/b/c", "./x", "../x", "~/x", "/x/y"]
)
def test_what_looks_like_a_file_is_said_to_be_none(name, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")  # beside files of whoever runs this some would be there
    with pytest.raises(Mamba2Error) as error:
        read_text(name)
    assert error.value.message == f"text: expected a file, got {name}: no such file"


def test_wikitext_rows_are_joined_by_blank_lines_empty_rows_included():
    text = Text("wikitext", WIKI_ROWS, has_headings=True)
    assert text.documents(split=False) == ["\n\n".join(WIKI_ROWS)]
    assert text.joining(False) == "rows joined by a blank line"


def test_wikitext_documents_begin_at_level_one_headings_and_lose_nothing():
    text = Text("wikitext", WIKI_ROWS, has_headings=True)
    first, second = text.documents(split=True)
    assert first + second == "\n\n".join(WIKI_ROWS)
    assert second.startswith(" = Second ( film ) = \n")
    assert "= = Part = =" in first


def test_documents_of_other_rows_are_the_rows(tmp_path):
    lines = "\n".join(json.dumps({"text": row}) for row in WIKI_ROWS)
    (tmp_path / "a.jsonl").write_text(lines)
    text = read_text(str(tmp_path / "a.jsonl"))
    assert text.documents(split=True) == WIKI_ROWS
    assert text.documents(split=False) == ["\n\n".join(WIKI_ROWS)]
    assert text.joining(True) == "a document a row"


def test_a_text_file_of_wikitext_splits_at_its_headings(tmp_path):
    (tmp_path / "wiki.txt").write_text("".join(WIKI_ROWS))
    assert len(read_text(str(tmp_path / "wiki.txt")).documents(split=True)) == 2
