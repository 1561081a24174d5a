"""The text that a measurement reads: named texts, files, standard input, data sets of the hub.

A source is a list of rows. As one document the rows are joined by a blank line, which is how
published WikiText perplexities are made ("\\n\\n".join over the rows, empty ones included). Split
into documents, each row is one, except where the rows are lines of WikiText: there a document begins
at each level-1 heading, " = Title = ".
"""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mamba_cli.errors import Mamba2Error

# name: (repo id of the data set, configuration, split)
NAMED = {
    "wikitext": ("Salesforce/wikitext", "wikitext-2-raw-v1", "test"),
    "wikitext-103": ("Salesforce/wikitext", "wikitext-103-raw-v1", "test"),
    "lambada": ("EleutherAI/lambada_openai", "default", "test"),
}
ROW_SEPARATOR = "\n\n"

# Two lines of formulas in WikiText's test split look like headings as well. They are taken for such:
# that gives the 62 pages of EleutherAI/wikitext_document_level, which lm-evaluation-harness reads.
_HEADING = re.compile(r"^ = [^=\n]*[^=\n\s] = $", re.MULTILINE)
_DATA_SET = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:[^:/]+){0,2}")
_FILE_SUFFIXES = (".txt", ".jsonl", ".parquet")


@dataclass(frozen=True)
class Text:
    """name: as the user gave it; rows: as stored; has_headings: rows are lines of WikiText."""

    name: str
    rows: list[str]
    has_headings: bool

    @property
    def title(self) -> str:
        """What a message calls it."""
        return "standard input" if self.name == "-" else self.name

    def documents(self, split: bool) -> list[str]:
        """Return the documents; joined (or split at headings) they are the text, character for character."""
        if split and not self.has_headings:
            return self.rows
        joined = ROW_SEPARATOR.join(self.rows)
        return _split_at_headings(joined) if split else [joined]

    def joining(self, split: bool) -> str:
        """Say in words how the rows became documents."""
        if split:
            return "a document a level-1 heading" if self.has_headings else "a document a row"
        return "one text" if len(self.rows) == 1 else "rows joined by a blank line"


def read_text(name: str, field: str = "text") -> Text:
    """Read the text that `name` means.

    name: a key of NAMED, a file (.jsonl and .parquet have rows, anything else is UTF-8 text), "-" for
    standard input, or owner/name[:config][:split] for a data set of the hub. field: the column, or key,
    that holds a row's text. A file of the given name goes before a data set.
    """
    if name == "-":
        return Text("-", [_decode(sys.stdin.buffer.read(), "standard input")], has_headings=True)
    if name in NAMED:
        repo, config, split = NAMED[name]
        return Text(name, _data_set_rows(f"{repo}:{config}:{split}", field), name.startswith("wikitext"))
    path = Path(name).expanduser()
    if path.is_dir():
        raise Mamba2Error(f"text: expected a file, got the folder {name}")
    if path.exists():  # a shell's <(command) is no regular file
        return Text(
            name, list(file_rows(path, field)), has_headings=path.suffix not in (".jsonl", ".parquet")
        )
    if path.suffix not in _FILE_SUFFIXES and _DATA_SET.fullmatch(name):
        rows = _data_set_rows(name, field)
        return Text(name, rows, has_headings=name.startswith("Salesforce/wikitext:"))
    if ":" not in name and ("/" in name or path.suffix):
        raise Mamba2Error(f"text: expected a file, got {name}: no such file")
    raise Mamba2Error(
        f"text: expected {', '.join(NAMED)}, a file, - or owner/name of a data set, got {name}, "
        "which is none of them"
    )


def file_rows(path: Path, field: str) -> Iterator[str]:
    """Yield the rows of a .jsonl or .parquet file, or the one row that any other file is."""
    if path.suffix == ".parquet":
        return _parquet_rows(path, field)
    if path.suffix == ".jsonl":
        return _jsonl_rows(path, field)
    return iter([_decode(path.read_bytes(), str(path))])


def _data_set_rows(name: str, field: str) -> list[str]:
    from mamba_cli.perplexity.data_sets import data_set_files

    return [row for path in data_set_files(name) for row in file_rows(path, field)]


def _split_at_headings(text: str) -> list[str]:
    """Cut before each heading; what stands before the first belongs to the first."""
    starts = [match.start() for match in _HEADING.finditer(text)][1:]
    return [text[first:last] for first, last in zip([0, *starts], [*starts, len(text)], strict=True)]


def _decode(data: bytes, name: str) -> str:
    """Decode UTF-8 exactly: no newline is translated, only a byte order mark is dropped."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Mamba2Error(
            f"{name}: expected UTF-8 text, got byte 0x{data[error.start]:02x} at offset {error.start}",
            hint=f"iconv -f ENCODING -t UTF-8 {name}",
        ) from None


def _jsonl_rows(path: Path, field: str) -> Iterator[str]:
    # Split at newlines only: str.splitlines also splits at characters that JSON strings may hold.
    for number, line in enumerate(_decode(path.read_bytes(), str(path)).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise Mamba2Error(
                f"{path}:{number}: expected one JSON object a line, got {line[:40]!r}"
            ) from None
        if not isinstance(row, dict) or not isinstance(row.get(field), str):
            found = type(row).__name__
            if isinstance(row, dict):
                found = f"{type(row[field]).__name__} there" if field in row else f"keys {', '.join(row)}"
            raise Mamba2Error(
                f"{path}:{number}: expected an object with a string under {field!r}, got {found}",
                hint="--field NAME names the key that holds the text",
            )
        try:
            row[field].encode()
        except UnicodeEncodeError:
            raise Mamba2Error(f"{path}:{number}: expected Unicode, got half a surrogate pair") from None
        yield row[field]


def _parquet_rows(path: Path, field: str) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = file.schema_arrow
            if field not in columns.names:
                raise Mamba2Error(
                    f"{path}: expected a column {field!r}, got {', '.join(columns.names)}",
                    hint="--field NAME names the column that holds the text",
                )
            kind = columns.field(field).type
            if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
                raise Mamba2Error(f"{path}: expected strings in column {field!r}, got {kind}")
            for batch in file.iter_batches(columns=[field]):
                for row in batch.column(0).to_pylist():
                    yield row or ""
    except (pyarrow.ArrowException, OSError) as error:
        raise Mamba2Error(f"{path}: expected a parquet file, got {str(error).splitlines()[0]}") from None
