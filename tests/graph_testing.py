"""A CUDA graph's stand-in on a CPU: a tape of the device work, which knows nothing of Python when it plays.

It refuses what a graph cannot capture: to wait for the device, and to copy Python's numbers onto it. Played,
it works on the memory that it was recorded on: what was made while recording is its own, as in a graph's
private pool; the rest it does not keep alive, and says so where that is gone.
"""

from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from mamba_cli import step_graph

WAITING_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
UPLOADS = {torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy}
DOWNLOADS = {torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.cpu, torch.Tensor.numpy}
INDEXING = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}


class _Borrowed:
    """A tensor in memory that is not the tape's."""

    def __init__(self, tensor: torch.Tensor, by: str):
        self.by = by
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.place = (tensor.storage_offset(), tensor.size(), tensor.stride())
        self.dtype = tensor.dtype

    def tensor(self) -> torch.Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        assert storage is not None, f"{self.by} works in memory that was freed: {self.dtype} {self.place}"
        return torch.empty(0, dtype=self.dtype).set_(storage, *self.place)


class Tape(TorchDispatchMode):
    """Records the operations and Triton kernels inside the block; `replay` runs them again."""

    def __init__(self) -> None:
        super().__init__()
        self.work: list[tuple[Any, tuple, dict, Any]] = []
        self.pool: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        assert not _waits(function, args), f"{function} waits for the device, in a capture"
        with self:  # in inference mode, operations made of others come here whole
            result = function.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        result = function(*args, **kwargs)
        theirs = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and _storage(leaf) not in theirs:
                self.pool[_storage(leaf)] = leaf
        if not function.__name__.startswith(("empty", "new_empty")):
            self.record(str(function), function, args, kwargs, result)
        return result

    def record(self, name: str, function, args: tuple, kwargs: dict, result: Any = None) -> None:
        def keep(tensor: torch.Tensor) -> torch.Tensor | _Borrowed:
            own = tensor.layout != torch.strided or _storage(tensor) in self.pool
            return tensor if own else _Borrowed(tensor, name)

        self.work.append((function, *tree_map_only(torch.Tensor, keep, (args, kwargs, result))))

    def replay(self) -> None:
        with torch.inference_mode():
            for function, *kept in self.work:
                args, kwargs, result = tree_map_only(_Borrowed, _Borrowed.tensor, kept)
                again = function(*args, **kwargs)
                for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                    if isinstance(old, torch.Tensor) and _storage(old) != _storage(new):
                        old.copy_(new)


class NoTransfers(TorchFunctionMode):
    """Refuses what moves numbers between Python and the device, which the operations do not show."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        assert function not in UPLOADS | DOWNLOADS, f"{function.__name__} in a capture"
        if function in INDEXING:
            assert not _has_list(args[1]), f"an index {args[1]} comes from Python, in a capture"
        return function(*args, **kwargs)


def _waits(function: torch._ops.OpOverload, args: tuple) -> bool:
    if function.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_):
        return any(index is not None and index.dtype == torch.bool for index in args[1])
    return bool(WAITING_TAGS & set(function.tags))


def _has_list(index: Any) -> bool:
    if isinstance(index, tuple):
        return any(map(_has_list, index))
    return isinstance(index, list | range)


def _storage(tensor: torch.Tensor) -> int:
    return id(tensor) if tensor.layout != torch.strided else tensor.untyped_storage()._cdata


def use_tapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all that captures graphs record tapes, on a CPU, with kernels in Triton's interpreter."""
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__
    tapes: list[Tape] = []

    def recorded(executor, *args, **kwargs):
        with _disable_current_modes():
            launch(executor, *args, **kwargs)
        if tapes:
            tapes[-1].record(executor.fn.__name__, lambda *a, **k: launch(executor, *a, **k), args, kwargs)

    def capture(run, device) -> Tape:
        run()
        run()
        tape = Tape()
        tapes.append(tape)
        try:
            with NoTransfers(), tape:
                run()
        finally:
            tapes.remove(tape)
        return tape

    monkeypatch.setattr(GridExecutor, "__call__", recorded)
    monkeypatch.setattr(step_graph, "capture", capture)
