"""Text to token ids and back, and where a checkpoint's tokenizer is found."""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mamba_cli.config import ModelConfig
from mamba_cli.errors import Mamba2Error

if TYPE_CHECKING:
    from mamba_cli.checkpoint import Checkpoint

# The published state-spaces checkpoints come without a tokenizer and were trained with this one:
# 50277 tokens, which some configurations count with their padding.
DEFAULT_TOKENIZER = "EleutherAI/gpt-neox-20b"
DEFAULT_VOCAB_SIZES = range(50277, 50305)

# Every file that belongs to a tokenizer, as patterns of names.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model*",
    "chat_template.jinja",
)

# What special tokens are called in tokenizers that have no configuration beside them.
USUAL_NAMES = {
    "bos": ("<s>", "<|begin_of_text|>", "<bos>"),
    "eos": ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>"),
    "pad": (),
}


class Backend(Protocol):
    """What a tokenizer library is asked for. Ids are below vocab_size."""

    vocab_size: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def token_id(self, token: str) -> int | None: ...


class Tokenizer:
    """A tokenizer and its special ids, None where there are none.

    encode adds no special tokens and decode neither drops them nor cleans up spaces, so that
    decode(encode(text)) is the text, as far as the tokenizer's own normalisation allows.
    """

    def __init__(
        self,
        backend: Backend,
        bos_id: int | None = None,
        eos_id: int | None = None,
        pad_id: int | None = None,
    ):
        self._backend = backend
        self.vocab_size = backend.vocab_size
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.pad_id = pad_id

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`. Names of special tokens inside it become those tokens."""
        return self._backend.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        return self._backend.decode(ids)

    def stream(self, context: Sequence[int] = ()) -> "TextStream":
        """Return a decoder for ids that come one by one after the ids of `context`."""
        return TextStream(self, context)


class TextStream:
    """Decodes ids one by one; the parts add up to decode(context + ids) without decode(context).

    A part never holds half a character: what could still change with the next id is held back.
    Ids are decoded together with the few before them, as some tokenizers write a word differently at
    the start of a text.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._window = list(context)  # the ids whose text is out already, then those whose is not
        self._written = tokenizer.decode(self._window) if self._window else ""
        self._settled = len(self._window)

    def push(self, token_id: int) -> str:
        """Take the next id and return the text that is certain now."""
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window)
        # A character whose bytes are not all there yet decodes to U+FFFD.
        if text.endswith("\ufffd") or not text.startswith(self._written):
            return ""
        new = text[len(self._written) :]
        if new:
            self._window = self._window[self._settled :]
            self._settled = len(self._window)
            self._written = self._tokenizer.decode(self._window)
        return new

    def finish(self) -> str:
        """Return what was held back: no more ids will come."""
        return self._tokenizer.decode(self._window)[len(self._written) :]


def load_tokenizer(checkpoint: "Checkpoint", source: str | None = None) -> Tokenizer:
    """Return the tokenizer of `checkpoint`, or of `source` where that is given.

    source: a folder, a tokenizer file, or a repo id of the hub. A checkpoint without a tokenizer
    gets DEFAULT_TOKENIZER where its vocabulary is of that size. Raises Mamba2Error where there is no
    tokenizer or it has ids that the model lacks.
    """
    config = checkpoint.config
    found = find_tokenizer(checkpoint.folder, config, source)
    backend = _open_backend(found, config.vocab_size)
    if backend.vocab_size > config.vocab_size:
        raise Mamba2Error(
            f"tokenizer {found}: expected ids below the model's vocab_size {config.vocab_size}, "
            f"got {backend.vocab_size - 1}",
            "name the model's own tokenizer with --tokenizer PATH_OR_REPO",
        )
    special = _special_ids(found if found.is_dir() else found.parent, config, backend)
    return Tokenizer(backend, special["bos"], special["eos"], special["pad"])


def find_tokenizer(folder: Path, config: ModelConfig, source: str | None = None) -> Path:
    """Return the folder or file that load_tokenizer reads; a repo id is fetched first."""
    if source is not None:
        path = Path(source).expanduser()
        if path.exists():
            if path.is_file() or _has_tokenizer(path):
                return path
            raise Mamba2Error(f"tokenizer: expected tokenizer.json or tokenizer.model in {path}, got neither")
        return _fetch(source)
    if _has_tokenizer(folder):
        return folder
    if config.vocab_size in DEFAULT_VOCAB_SIZES:
        return _fetch(DEFAULT_TOKENIZER)
    raise Mamba2Error(
        f"tokenizer: expected tokenizer.json or tokenizer.model in {folder}, got neither",
        "name one with --tokenizer PATH_OR_REPO",
    )


def _fetch(repo: str) -> Path:
    """Return the cached folder of the tokenizer files of `repo`, downloaded where need be."""
    from mamba_cli.hub import REPO_ID, snapshot

    if not REPO_ID.fullmatch(repo):
        raise Mamba2Error(f"tokenizer: expected a folder, a file or a repo id (owner/name), got {repo}")
    folder = snapshot(repo, None, list(TOKENIZER_FILES))
    if folder is None:
        raise Mamba2Error(
            f"tokenizer: expected {repo} from the hub or in its cache, got neither",
            f"hf download {repo} tokenizer.json tokenizer_config.json",
        )
    if not _has_tokenizer(folder):
        raise Mamba2Error(f"tokenizer: expected tokenizer.json or tokenizer.model in {repo}, got neither")
    return folder


def _has_tokenizer(folder: Path) -> bool:
    return any(_files(folder, "tokenizer.json", "tokenizer.model*", "vocab.json"))


def _files(folder: Path, *patterns: str) -> list[Path]:
    return [path for pattern in patterns for path in sorted(folder.glob(pattern)) if path.is_file()]


def _open_backend(source: Path, vocab_size: int) -> Backend:
    """Return the backend for a folder or file. Only added tokens depend on the model's vocab_size."""
    file = source
    if source.is_dir():
        file = next(iter(_files(source, "tokenizer.json", "tokenizer.model*")), source)
    try:
        if file.suffix == ".json":
            return _Tokenizers.from_file(file, vocab_size)
        if file.is_file():
            return _SentencePiece(file)
        return _Transformers(file)
    except Mamba2Error:
        raise
    except Exception as error:  # each library has exceptions of its own
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        raise Mamba2Error(f"{file}: expected a tokenizer, got: {first_line}") from error


class _Tokenizers:
    """A tokenizer.json, read by the `tokenizers` library."""

    def __init__(self, tokenizer: Any):
        # Both can be saved in the file, as settings of its author's training.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.vocab_size = max(tokenizer.get_vocab().values(), default=-1) + 1

    @classmethod
    def from_file(cls, file: Path, vocab_size: int) -> "_Tokenizers":
        """Read `file` without the added tokens that a model of vocab_size has never seen.

        A tokenizer may be shared by models, and carry the chat tokens of another: for this model
        their names are plain text.
        """
        import tokenizers

        backend = cls(tokenizers.Tokenizer.from_file(str(file)))
        if backend.vocab_size <= vocab_size:
            return backend
        document = json.loads(file.read_text(encoding="utf-8"))
        document["added_tokens"] = [
            token for token in document.get("added_tokens") or () if token["id"] < vocab_size
        ]
        return cls(tokenizers.Tokenizer.from_str(json.dumps(document)))

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def token_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)


class _SentencePiece:
    """A SentencePiece model. Its own library gives its own ids; a conversion may not."""

    def __init__(self, file: Path):
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError as error:
            raise Mamba2Error(
                f"{file}: expected the sentencepiece package to read it, got: {error}",
                "pip install sentencepiece",
            ) from error
        self._processor = SentencePieceProcessor(model_file=str(file))
        self.vocab_size = self._processor.vocab_size()

    def encode(self, text: str) -> list[int]:
        return self._processor.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._processor.decode(list(ids))

    def token_id(self, token: str) -> int | None:
        token_id = self._processor.piece_to_id(token)
        return None if token_id == self._processor.unk_id() else token_id


class _Transformers:
    """Any other kind of tokenizer that transformers can read from a folder."""

    def __init__(self, folder: Path):
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        self.vocab_size = max(self._tokenizer.get_vocab().values(), default=-1) + 1

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def token_id(self, token: str) -> int | None:
        return self._tokenizer.get_vocab().get(token)


def _special_ids(folder: Path, config: ModelConfig, backend: Backend) -> dict[str, int | None]:
    """Return the ids of bos, eos and pad.

    The tokenizer's own files come first: a model's configuration often holds another library's
    defaults, ids that mean something else in this vocabulary.
    """
    named = [_read_json(folder / name) for name in ("tokenizer_config.json", "special_tokens_map.json")]
    generation = _read_json(folder / "generation_config.json")
    special: dict[str, int | None] = {}
    for kind, usual_names in USUAL_NAMES.items():
        candidates = [_id_of(file.get(f"{kind}_token"), backend) for file in named]
        candidates.append(_first(generation.get(f"{kind}_token_id")))
        candidates.append(getattr(config, f"{kind}_token_id"))
        candidates += [backend.token_id(name) for name in usual_names]
        known = (found for found in candidates if found is not None and 0 <= found < backend.vocab_size)
        special[kind] = next(known, None)
    return special


def _id_of(token: Any, backend: Backend) -> int | None:
    """Return the id of a token that is spelt as a string or as {"content": string}."""
    if isinstance(token, dict):
        token = token.get("content")
    return backend.token_id(token) if isinstance(token, str) else None


def _first(ids: Any) -> int | None:
    first = ids[0] if isinstance(ids, list) and ids else ids
    return first if isinstance(first, int) else None


def _read_json(file: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        document = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(document, dict):
            return document
    return {}
