"""Documents as token ids: the prefix token, the limits, and how much text the predictions cover."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from mamba_cli.errors import Mamba2Error
from mamba_cli.perplexity.statistics import count_words
from mamba_cli.perplexity.windows import Window

PREFIXES = ("none", "bos", "eos")


class TokenizerLike(Protocol):
    """What is needed of mamba_cli.tokenizer.Tokenizer."""

    bos_id: int | None
    eos_id: int | None

    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: list[int]) -> str: ...


@dataclass(frozen=True)
class Document:
    """ids: int64 (tokens,), prefix token included where one was put before; text: what the ids say."""

    ids: torch.Tensor
    text: str
    prefixed: bool

    def cut(self, length: int, tokenizer: TokenizerLike) -> "Document":
        """Return the first `length` tokens and their text."""
        if length >= len(self.ids):
            return self
        ids = self.ids[:length]
        # A cut inside a character decodes to U+FFFD, which the text does not hold.
        text = tokenizer.decode(ids[int(self.prefixed) :].tolist()).rstrip("\ufffd")
        return replace(self, ids=ids, text=text)


def prefix_token(tokenizer: TokenizerLike, prefix: str) -> int | None:
    """Return the id that `prefix`, one of PREFIXES, puts before each document."""
    if prefix not in PREFIXES:
        raise Mamba2Error(f"prefix: expected {', '.join(PREFIXES)}, got {prefix}")
    if prefix == "none":
        return None
    token = tokenizer.bos_id if prefix == "bos" else tokenizer.eos_id
    if token is None and prefix == "bos" and tokenizer.eos_id is not None:
        # GPT-style tokenizers have one token for both ends, often without saying so of the beginning.
        token = tokenizer.eos_id if tokenizer.decode([tokenizer.eos_id]) == "<|endoftext|>" else None
    if token is None:
        raise Mamba2Error(f"prefix: expected a tokenizer with a {prefix.upper()} token, got one without")
    return token


def encode_documents(
    texts: Iterable[str],
    tokenizer: TokenizerLike,
    prefix: int | None,
    vocab_size: int,
    max_tokens: int | None = None,
) -> list[Document]:
    """Encode documents until `max_tokens` tokens of text are there; the prefix tokens do not count.

    A prefix is put where the document does not begin with that very token already, so it is never
    doubled. An id that is not below `vocab_size` is an error: the model has no row for it.
    """
    if max_tokens is not None and max_tokens < 1:
        raise Mamba2Error(f"max-tokens: expected at least 1, got {max_tokens}")
    documents = []
    left = max_tokens
    for text in texts:
        if left == 0:
            break
        ids = tokenizer.encode(text)
        prefixed = prefix is not None and ids[:1] != [prefix]
        whole = torch.tensor([prefix, *ids] if prefixed else ids, dtype=torch.int64)
        if len(whole) and (highest := int(whole.max())) >= vocab_size:
            raise Mamba2Error(
                f"token ids: expected below the model's vocabulary of {vocab_size}, got {highest}",
                hint="--tokenizer names the tokenizer that the model was trained with",
            )
        document = Document(whole, text, prefixed)
        if left is not None:
            document = document.cut(left + prefixed, tokenizer)
            left -= len(document.ids) - prefixed
        documents.append(document)
    return documents


def cut_to_windows(
    documents: Sequence[Document], windows: Sequence[Window], tokenizer: TokenizerLike
) -> list[Document]:
    """Return the documents that `windows` read, each as far as they read or predict it."""
    reached = {window.document: window.stop + 1 for window in windows}
    return [documents[index].cut(length, tokenizer) for index, length in reached.items()]


@dataclass(frozen=True)
class Extent:
    """How much text a measurement covers: tokens of text, and the bytes and words that they spell."""

    tokens: int
    bytes: int
    words: int


def measure_extent(documents: Sequence[Document], tokenizer: TokenizerLike) -> Extent:
    """Count what the predictions cover.

    bytes: UTF-8, without those of a first token that nothing predicts. words: of the original text
    by lm-evaluation-harness's rule, a word that begins with an unpredicted token included.
    """
    size = 0
    for document in documents:
        size += len(document.text.encode())
        if not document.prefixed:
            size -= len(tokenizer.decode(document.ids[:1].tolist()).encode())
    return Extent(
        tokens=sum(len(document.ids) - document.prefixed for document in documents),
        bytes=max(size, 0),
        words=count_words(document.text for document in documents),
    )
