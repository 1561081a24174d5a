"""Several processes on one measurement, as `torchrun` starts them: each scores a share of the batches."""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed

from mamba_cli.errors import Mamba2Error


@dataclass(frozen=True)
class Processes:
    """This process's place among `size` cooperating ones; local_rank is its place on its machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def reports(self) -> bool:
        """Whether this is the one process that prints."""
        return self.rank == 0

    def device(self, name: str) -> str:
        """Return `name`, or where that leaves the choice open ("auto", "cuda") this process's own GPU."""
        if self.size > 1 and name in ("auto", "cuda") and torch.cuda.is_available():
            return f"cuda:{self.local_rank % torch.cuda.device_count()}"
        return name

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of a CPU tensor over the processes."""
        return self._together(torch.distributed.all_reduce, values)

    def from_first(self, values: torch.Tensor) -> torch.Tensor:
        """Return the first process's values of a CPU tensor of the same shape everywhere."""
        return self._together(torch.distributed.broadcast, values, 0)

    def _together(self, operation: Callable[..., object], values: torch.Tensor, *arguments) -> torch.Tensor:
        if self.size == 1:
            return values
        values = values.clone()
        try:
            operation(values, *arguments)
        except RuntimeError as error:
            raise Mamba2Error("processes: expected all of them to answer, got one that stopped") from error
        return values


@contextlib.contextmanager
def join_processes() -> Iterator[Processes]:
    """Join the processes that torchrun's environment variables describe; alone where there are none.

    The scores that are exchanged are few and lie on the CPU, so the group is gloo's wherever the
    models run: NCCL would add nothing but a way to fail.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield Processes()
        return
    torch.distributed.init_process_group("gloo")
    try:
        rank = torch.distributed.get_rank()
        yield Processes(rank, size, int(os.environ.get("LOCAL_RANK", rank)))
    finally:
        torch.distributed.destroy_process_group()
