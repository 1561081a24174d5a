"""The windows of packed sequences are those of each sequence alone."""

import pytest
import torch

from mamba_kernels.causal_conv1d_varlen import causal_conv1d_varlen_states, causal_conv1d_varlen_states_ref


@pytest.mark.parametrize("state_len", [1, 3, 4, 7])
@pytest.mark.parametrize("lengths", [[5, 20, 3], [1], [2, 0, 9], [0, 0], []])
def test_windows_end_with_their_sequence(lengths, state_len):
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    x = torch.randn(sum(lengths), 6)
    states = causal_conv1d_varlen_states(x, cu_seqlens, state_len)
    assert torch.equal(states, causal_conv1d_varlen_states_ref(x, cu_seqlens, state_len))
    for state, sequence in zip(states, x.split(lengths), strict=True):
        alone = torch.nn.functional.pad(sequence.T, (state_len, 0))[:, -state_len:]
        assert torch.equal(state, alone)


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="state_len: expected a positive number, got 0"):
        causal_conv1d_varlen_states(torch.zeros(3, 2), torch.tensor([0, 3]), 0)
    with pytest.raises(ValueError, match="x: expected 2 dimensions"):
        causal_conv1d_varlen_states(torch.zeros(1, 3, 2), torch.tensor([0, 3]), 4)
