"""Models whose every probability is known, for the tests of perplexity.

A stand-in answers by a table: its logits after some tokens are a row of the table, chosen by the sum
of all tokens since the state was empty. So every prediction depends on the whole context, and a test
can say what it must be without the code under test.
"""

import dataclasses
from dataclasses import dataclass

import torch

from mamba_cli.perplexity.tokens import Document
from model_testing import BASE

VOCAB, ROWS, TABLE = 11, 16, 7


@dataclass
class StandInState:
    total: torch.Tensor  # (batch,) sum of the tokens read

    @property
    def nbytes(self) -> int:
        return self.total.nbytes


class StandIn:
    """A language model by table (TABLE, ROWS); rows past VOCAB are padding and hold large logits."""

    name, backend = "stand-in", "torch"
    device, dtype = torch.device("cpu"), torch.float32
    state_dtype, state_format, columns = "fp32", None, None

    def __init__(self, table: torch.Tensor):
        self.config = dataclasses.replace(BASE, vocab_size=VOCAB, vocab_rows=ROWS)
        self.table = table.clone()
        self.table[:, VOCAB:] = 50.0
        self.calls: list[tuple[int, int]] = []
        self.head_rows: list[int] = []

    def init_state(self, batch: int) -> StandInState:
        return StandInState(torch.zeros(batch, dtype=torch.int64))

    def hidden_states(self, input_ids, state=None):
        self.calls.append(tuple(input_ids.shape))
        start = self.init_state(len(input_ids)).total if state is None else state.total
        totals = start[:, None] + input_ids.cumsum(1)
        return totals[..., None], StandInState(totals[:, -1])

    def logits(self, hidden):
        self.head_rows.append(hidden[..., 0].numel())
        return self.table[hidden[..., 0] % TABLE]

    def prefill(self, input_ids, state=None):
        hidden, state = self.hidden_states(input_ids, state)
        return self.logits(hidden[:, -1]), state

    def step_(self, token_ids, state):
        state.total += token_ids
        return self.table[state.total % TABLE]


def random_stand_in(seed: int = 0) -> StandIn:
    return StandIn(torch.randn(TABLE, ROWS, generator=torch.Generator().manual_seed(seed)) * 3)


class FollowingModel(StandIn):
    """After token t expects token t + 1 (modulo VOCAB), with `surprise` nats for any other."""

    def __init__(self, surprise: float):
        super().__init__(torch.zeros(TABLE, ROWS))
        self.surprise = surprise

    def hidden_states(self, input_ids, state=None):
        return input_ids[..., None], StandInState(input_ids[:, -1])

    def logits(self, hidden):
        logits = torch.full((*hidden.shape[:-1], ROWS), -self.surprise)
        return logits.scatter(-1, (hidden + 1) % VOCAB, 0.0)

    def step_(self, token_ids, state):
        return self.logits(token_ids[:, None])


def expected_nlls(model: StandIn, ids: list[int], window: int, stride: int) -> list[float]:
    """NLL of ids[1:] by the definition: each target in the first window that predicts it, in float64."""
    result = []
    for target in range(1, len(ids)):
        k = 0
        while target > k * stride + window:
            k += 1
        row = model.table[sum(ids[k * stride : target]) % TABLE, :VOCAB].double()
        result.append((row.logsumexp(0) - row[ids[target]]).item())
    return result


def documents(*ids: list[int], prefixed: bool = False) -> list[Document]:
    return [Document(torch.tensor(each), " ".join(map(str, each)), prefixed) for each in ids]


def some_ids(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (length,), generator=generator).tolist()


class NumberTokenizer:
    """Text is numbers between blanks; the number is the id."""

    bos_id: int | None = 1
    eos_id: int | None = 2

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))
