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
