"""Stand-ins for the tests of generation: small tokenizers made by code, and a model without layers."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers

from mamba_cli.tokenizer import Tokenizer, load_tokenizer

END = "<|endoftext|>"
CORPUS = [
    "Once upon a time there was a fox who liked the sea. The fox said: I don't like rain!",
    "alpha beta gamma delta, Paris and Pari; naïve café, 你好, 🙂🙃",
    "x != y, it's of 'sensing things .",
] * 3


def save_byte_level_bpe(folder: Path, vocab_size: int = 400) -> Path:
    """Write a byte-level BPE tokenizer.json as GPT-NeoX's, its id 0 the end-of-text token."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _save(tokenizer, folder)


def save_word_level(folder: Path, words: Sequence[str]) -> Path:
    """Write a tokenizer of whole words, whose decoder puts the spaces between them."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _save(tokenizer, folder)


def save_byte_fallback(folder: Path) -> Path:
    """Write a SentencePiece-like tokenizer: words begin with a mark, unknown characters are bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz"]
    tokenizer = tokenizers.Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _save(tokenizer, folder)


def checkpoint(folder: Path, vocab_size: int, **ids: int) -> SimpleNamespace:
    """Return what load_tokenizer needs to know of a checkpoint."""
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None} | ids
    config = SimpleNamespace(vocab_size=vocab_size, vocab_rows=vocab_size + 3, **special)
    return SimpleNamespace(folder=folder, config=config)


class StubState:
    """The ids each row has read."""

    def __init__(self, rows: list[list[int]]):
        self.rows = rows

    @property
    def nbytes(self) -> int:
        return 8 * sum(map(len, self.rows))

    def repeat(self, count: int) -> "StubState":
        return StubState([list(row) for row in self.rows for _ in range(count)])


class StubModel:
    """The interface of LanguageModel over a function from a row's ids to its logits (vocab_rows,)."""

    device = torch.device("cpu")
    dtype = torch.float32
    state_dtype = "fp32"
    captures = False
    backend = "torch"
    name = "stub"

    def __init__(self, tokenizer: Tokenizer, logits: Callable[[list[int]], torch.Tensor]):
        self.tokenizer = tokenizer
        self.config = SimpleNamespace(vocab_size=tokenizer.vocab_size, vocab_rows=tokenizer.vocab_size + 3)
        self.prefills = 0
        self.steps = 0
        self._logits = logits

    def prefill(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, StubState]:
        self.prefills += 1
        state = StubState(input_ids.tolist())
        return self._rows(state), state

    def step_(self, token_ids: torch.Tensor, state: StubState) -> torch.Tensor:
        self.steps += 1
        for row, token_id in zip(state.rows, token_ids.tolist(), strict=True):
            row.append(token_id)
        return self._rows(state)

    def _rows(self, state: StubState) -> torch.Tensor:
        return torch.stack([self._logits(row) for row in state.rows])


def byte_level(folder: Path) -> Tokenizer:
    """Return the byte-level BPE tokenizer, loaded as for a checkpoint."""
    save_byte_level_bpe(folder)
    return load_tokenizer(checkpoint(folder, 400))


def scripted(tokenizer: Tokenizer, prompt_tokens: int, script: Sequence[int]) -> StubModel:
    """Return a model that says `script` after the prompt, then the end of text for ever."""

    def logits(ids: list[int]) -> torch.Tensor:
        said = len(ids) - prompt_tokens
        row = torch.zeros(tokenizer.vocab_size + 3)
        row[script[said] if said < len(script) else 0] = 50.0
        return row

    return StubModel(tokenizer, logits)


def markov(tokenizer: Tokenizer, seed: int = 0) -> StubModel:
    """Return a model whose next token depends on the last alone; its padding is the likeliest of all."""
    size = tokenizer.vocab_size
    table = torch.randn(size + 3, size + 3, generator=torch.Generator().manual_seed(seed)) * 3
    table[:, size:] = 100.0
    return StubModel(tokenizer, lambda ids: table[ids[-1]])


def _save(tokenizer: tokenizers.Tokenizer, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
