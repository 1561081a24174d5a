"""Convolution windows at the ends of packed sequences, as causal-conv1d's `causal_conv1d_varlen_states`."""

import torch

from mamba_kernels.checks import check, check_rank


def causal_conv1d_varlen_states(x: torch.Tensor, cu_seqlens: torch.Tensor, state_len: int) -> torch.Tensor:
    """Return the last state_len tokens of each packed sequence, zeros before its first: a conv_state each.

    Args:
        x: (total tokens, dim), the sequences one after the other.
        cu_seqlens: (sequences + 1,) integers, where each begins and the last one ends.
        state_len: columns to return, as many as the convolution's state holds.

    Returns:
        (sequences, dim, state_len) in x's dtype, newest column last. Nothing waits for the device.
    """
    check_rank("x", x, 2)
    check_rank("cu_seqlens", cu_seqlens, 1)
    check(cu_seqlens.numel() > 0, "cu_seqlens", "at least one bound", "none")
    check(state_len > 0, "state_len", "a positive number", state_len)
    begins, ends = cu_seqlens[:-1, None].long(), cu_seqlens[1:, None].long()
    tokens = ends - state_len + torch.arange(state_len, device=x.device)  # (sequences, state_len)
    if x.shape[0] == 0:
        return x.new_zeros(tokens.shape[0], x.shape[1], state_len)
    columns = x[tokens.clamp(min=0)].where((tokens >= begins)[..., None], 0)
    return columns.transpose(1, 2)


def causal_conv1d_varlen_states_ref(
    x: torch.Tensor, cu_seqlens: torch.Tensor, state_len: int
) -> torch.Tensor:
    """As `causal_conv1d_varlen_states`, a sequence at a time."""
    bounds = cu_seqlens.tolist()
    states = x.new_zeros(len(bounds) - 1, x.shape[1], state_len)
    for state, begin, end in zip(states, bounds[:-1], bounds[1:], strict=True):
        kept = min(state_len, end - begin)
        if kept:
            state[:, -kept:] = x[end - kept : end].T
    return states
