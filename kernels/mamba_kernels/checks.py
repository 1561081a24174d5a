"""Argument checks of the public operations: `what: expected X, got Y`, raised as ValueError."""

from collections.abc import Sequence

import torch


def check_shape(name: str, tensor: torch.Tensor | None, shape: Sequence[int]) -> None:
    """Raise unless `tensor` is None or has exactly `shape`."""
    if tensor is not None and tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name}: expected shape {tuple(shape)}, got {tuple(tensor.shape)}")


def check_rank(name: str, tensor: torch.Tensor, *ranks: int) -> None:
    """Raise unless `tensor` has one of the given numbers of dimensions."""
    if tensor.dim() not in ranks:
        expected = " or ".join(str(rank) for rank in ranks)
        raise ValueError(f"{name}: expected {expected} dimensions, got {tuple(tensor.shape)}")


def check_device(device: torch.device, **tensors: torch.Tensor | None) -> None:
    """Raise unless every tensor that is given lies on `device`."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{name}: expected device {device}, got {tensor.device}")


def check(condition: bool, name: str, expected: object, got: object) -> None:
    """Raise `name: expected X, got Y` unless `condition` holds."""
    if not condition:
        raise ValueError(f"{name}: expected {expected}, got {got}")


def check_rows(name: str, tensor: torch.Tensor, shape: Sequence[int]) -> None:
    """Raise unless `tensor` has `shape`, (batch, width), and its rows lie adjacent in memory."""
    check_shape(name, tensor, shape)
    check(tensor.stride(1) == 1, name, "unit stride along a row", f"strides {tensor.stride()}")


def check_slots(slots: torch.Tensor | None, batch: int, name: str, state: torch.Tensor) -> None:
    """Raise unless `slots` names a slot of `state` for each row of the batch, or it has one for each."""
    if slots is None:
        check(state.shape[0] >= batch, name, f"at least {batch} slots", state.shape[0])
    else:
        check_shape("state_batch_indices", slots, (batch,))
        check(slots.is_contiguous(), "state_batch_indices", "a contiguous tensor", slots.stride())
