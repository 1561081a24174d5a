"""How the next token is chosen from logits: the user's parameters, and the random numbers.

The arithmetic is mamba_kernels.choose_token. Randomness comes in as numbers drawn before, so that a choice
can be captured in a CUDA graph, and a seed gives the same text on every device (as far as the logits are
the same).
"""

import math
import random
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from mamba_cli.errors import Mamba2Error

if TYPE_CHECKING:  # the command line reads the defaults below, and its help must not wait for torch
    import torch


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen, applied in the order of the fields, the order transformers has too.

    repetition_penalty: logits of tokens seen before are divided by it where positive, and multiplied
    where negative (Keskar et al. 2019, section 4.1); 1 is off.
    temperature: divides the logits; 0 takes the most likely token, always.
    top_k: keeps the k most likely tokens, ties included; 0 is off.
    top_p: keeps the fewest most likely tokens whose probabilities reach it together (Holtzman et al.
    2020, section 3.1), of what top_k kept; 1 is off.
    min_p: keeps tokens at least min_p times as likely as the most likely one; 0 is off.
    """

    repetition_penalty: float = 1.0
    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 0.95
    min_p: float = 0.0

    def __post_init__(self) -> None:
        for name, valid, expected in (
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "a number above 0"),
            ("temperature", 0 <= self.temperature < math.inf, "0 or a positive number"),
            ("top_k", self.top_k >= 0, "0 or a positive integer"),
            ("top_p", 0 < self.top_p <= 1, "a number above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "a number from 0 to 1"),
        ):
            if not valid:
                raise Mamba2Error(f"{name}: expected {expected}, got {getattr(self, name)}")

    @property
    def greedy(self) -> bool:
        """Whether no random number is needed: fp32 cannot divide by less, nor would it matter."""
        return self.temperature < 1e-9

    @property
    def arguments(self) -> dict[str, float]:
        """The same as keyword arguments of mamba_kernels.choose_token."""
        return asdict(self) | ({"temperature": 0.0} if self.greedy else {})


class UniformNumbers:
    """A stream of numbers in [0, 1) for each sample, fixed by the seed and the sample's index alone."""

    def __init__(self, seed: int, samples: int):
        # Python documents that these stay the same in every version.
        self._streams = [random.Random(f"{seed}/{index}") for index in range(samples)]

    def draw(self, steps: int) -> "torch.Tensor":
        """Return the numbers of the next steps: float64 (steps, samples), on the CPU."""
        import torch

        numbers = [[stream.random() for stream in self._streams] for _ in range(steps)]
        return torch.tensor(numbers, dtype=torch.float64)


def sample(
    logits: "torch.Tensor",
    params: SamplingParams,
    vocab_size: int,
    uniform: "torch.Tensor | None" = None,
    seen: "torch.Tensor | None" = None,
) -> "torch.Tensor":
    """Return a token id for each row: int64 (batch,), below vocab_size.

    logits: (batch, at least vocab_size), any floating dtype; the columns from vocab_size on are
    padding and are not looked at. uniform: float64 (batch,) in [0, 1), not needed when greedy.
    seen: bool (batch, vocab_size), the tokens that repetition_penalty applies to.

    The token is the first whose cumulative probability, in the order of ids, passes the row's number:
    small differences between devices then move the choice only where the number lies on a boundary.
    """
    from mamba_kernels.choose_token import choose_token_ref

    return choose_token_ref(logits, vocab_size=vocab_size, uniform=uniform, seen=seen, **params.arguments)
