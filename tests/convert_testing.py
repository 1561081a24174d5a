"""What the tests of conversions share."""

import pytest
import torch
from tokenizers import Tokenizer, models

from mamba_cli.checkpoint import open_checkpoint
from mamba_cli.convert import convert
from mamba_cli.errors import Mamba2Error
from mamba_cli.storage import same_bits
from model_testing import VARIANTS, variant

HEAD, EMBEDDING = "lm_head.weight", "backbone.embedding.weight"
HELD_BY_ALL = {
    name: VARIANTS[name]
    for name in (
        "plain groups_between_one_and_nheads groups_as_heads wide_state conv_of_two dt_limited "
        "projection_bias no_conv_bias residual_in_model_dtype untied"
    ).split()
} | {
    "three_times_as_wide": variant(d_model=48, d_inner=144, d_ssm=144),
    # A convolution whose weight has as many channels as columns, which says nothing about its layout.
    "square_conv": variant(d_model=1, d_inner=2, d_ssm=2, headdim=2, d_state=1),
}


def message(*arguments, **options) -> str:
    """Return why a conversion is refused: one line."""
    with pytest.raises(Mamba2Error) as caught:
        convert(*arguments, **options)
    assert "\n" not in caught.value.message
    return caught.value.message


def assert_same_tensors(first, second) -> None:
    first, second = open_checkpoint(first).tensors, open_checkpoint(second).tensors
    assert first.keys() == second.keys()
    assert all(same_bits(first[name].load(), second[name].load()) for name in first)


def contents(folder) -> dict[str, bytes]:
    """Return the files below a folder, by path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def word_tokenizer(folder, size: int = 61):
    """Write a tokenizer.json of `size` words whose first ends a text; return the folder."""
    folder.mkdir(exist_ok=True)
    vocabulary = {"<|endoftext|>": 0} | {f"w{index}": index for index in range(1, size)}
    Tokenizer(models.WordLevel(vocabulary, unk_token="w1")).save(str(folder / "tokenizer.json"))
    return folder
