"""Whether a checkpoint's values are sound: reads every tensor, one at a time.

`open_checkpoint` has already refused missing, unknown and wrongly shaped tensors and a configuration
that contradicts them. What is left is what only the values, or the tokenizer beside them, can show.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from mamba_cli.checkpoint import Checkpoint
from mamba_cli.config import ModelConfig
from mamba_cli.inspection import TokenizerFacts, tokenizer_facts

# Elements looked at in one go, so that the temporaries stay small beside a large tensor.
BLOCK = 1 << 22


@dataclass(frozen=True)
class Finding:
    """One thing wrong. A broken model cannot work; the other findings are merely suspicious."""

    broken: bool
    check: str  # "nan", "inf", "zero", "constant" or "config"
    subject: str  # a tensor's canonical name, or a field of the configuration
    detail: str


@dataclass(frozen=True)
class Soundness:
    """What `check_checkpoint` read and found."""

    tensors: int
    nbytes: int
    findings: tuple[Finding, ...]

    @property
    def broken(self) -> int:
        """How many findings a model cannot work with."""
        return sum(finding.broken for finding in self.findings)


def check_checkpoint(
    checkpoint: Checkpoint, on_read: Callable[[int], object] = lambda nbytes: None
) -> Soundness:
    """Read every tensor and report what is wrong with it; memory stays near the largest tensor.

    on_read: called with a tensor's bytes once it is checked.
    Raises Mamba2Error where a tensor cannot be read.
    """
    findings = [Finding(False, "config", "checkpoint", note) for note in checkpoint.notes]
    findings += check_config(checkpoint.config, tokenizer_facts(checkpoint))
    nbytes = 0
    for name, stored in checkpoint.tensors.items():
        findings += check_values(name, stored.load())
        nbytes += stored.nbytes
        on_read(stored.nbytes)
    return Soundness(len(checkpoint.tensors), nbytes, tuple(findings))


def check_values(name: str, tensor: torch.Tensor) -> list[Finding]:
    """Report NaN and infinities, else values that are all zero or all the same.

    A weight of zeros passes nothing on, and a constant matrix tells no input from another: broken.
    Zero biases, A_log, D and dt_bias and constant vectors can work, but are what an initialisation
    leaves or a faulty conversion makes: suspicious.
    """
    values = tensor.reshape(-1)
    low, high = math.inf, -math.inf
    bad: dict[str, tuple[int, int]] = {}  # check: (how many, flat index of the first)
    for start in range(0, values.numel(), BLOCK):
        block = values[start : start + BLOCK]
        block = block if block.dtype == torch.float64 else block.float()
        block_low, block_high = (value.item() for value in block.aminmax())
        low, high = min(low, block_low), max(high, block_high)
        if math.isfinite(block_low) and math.isfinite(block_high):  # aminmax hands a NaN on
            continue
        for check, mask in (("nan", block.isnan()), ("inf", block.isinf())):
            if mask.any():
                count, first = bad.get(check, (0, start + int(mask.int().argmax())))
                bad[check] = (count + int(mask.sum()), first)
    if bad:
        return [
            Finding(
                True, check, name, f"{count} of {values.numel()} elements, first at {_index(first, tensor)}"
            )
            for check, (count, first) in bad.items()
        ]
    weight = name.endswith(".weight")
    if low == high == 0:
        return [Finding(weight, "zero", name, f"all {values.numel()} elements are zero")]
    if low == high and values.numel() > 1:
        return [Finding(weight and tensor.dim() > 1, "constant", name, f"every element is {low:g}")]
    return []


def _index(flat: int, tensor: torch.Tensor) -> list[int]:
    return [int(axis) for axis in torch.unravel_index(torch.tensor(flat), tensor.shape)]


def check_config(config: ModelConfig, tokenizer: TokenizerFacts) -> Iterator[Finding]:
    """Report a tokenizer the model cannot be used with, and special ids that mean no token."""
    if tokenizer.problem:
        yield Finding(True, "config", "tokenizer", tokenizer.problem)
    for kind in ("bos", "eos", "pad"):
        name = f"{kind}_token_id"
        token, tokenizers_own = getattr(config, name), getattr(tokenizer, f"{kind}_id")
        if token is None:
            continue
        if not 0 <= token < config.vocab_size:
            detail = f"expected below vocab_size {config.vocab_size}, got {token}"
            yield Finding(token >= config.vocab_rows, "config", name, detail)
        elif tokenizers_own is not None and token != tokenizers_own:
            yield Finding(False, "config", name, f"expected the tokenizer's {tokenizers_own}, got {token}")
