"""The tape that stands in for a CUDA graph refuses what a graph cannot do, and replays what it can."""

import pytest
import torch

from graph_testing import NoTransfers, Tape

WAITS = {
    "item": lambda x: x.sum().item(),
    "a number": lambda x: float(x[0]),
    "bool": lambda x: bool(x.any()),
    "nonzero": lambda x: x.nonzero(),
    "a mask": lambda x: x[x > 0],
    "setting a mask": lambda x: x.__setitem__(x > 0, torch.zeros_like(x)),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "tensor": lambda x: x + torch.tensor([1.0, 2.0, 3.0]),
    "a list": lambda x: x[[0, 2]],
    "setting a list": lambda x: x.__setitem__([0, 2], 1.0),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS.keys())
def test_a_tape_refuses_what_a_graph_cannot_capture(wait):
    x = torch.ones(3)
    with torch.inference_mode(), pytest.raises(AssertionError, match="in a capture"), NoTransfers(), Tape():
        wait(x)


def test_a_tape_works_in_the_memory_it_was_given():
    x, gone = torch.arange(3.0), torch.ones(3)
    with torch.inference_mode(), NoTransfers(), Tape() as tape:
        y = (x.view(3, 1) * 2).sum(1) + 1
        x += 1
    assert y.tolist() == [1, 3, 5]
    tape.replay()
    assert y.tolist() == [3, 5, 7] and x.tolist() == [2, 3, 4]
    with torch.inference_mode(), Tape() as tape:
        y = x + gone
    tape.replay()
    del gone
    with pytest.raises(AssertionError, match="freed"):
        tape.replay()
