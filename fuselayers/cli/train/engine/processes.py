"""The processes of a run: this one alone, or those that torchrun started.

They communicate through a process group: gloo for numbers on the CPU, nccl for tensors on GPUs.
"""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ...text import is_launched

Value = TypeVar("Value")


@dataclass(frozen=True)
class Processes:
    """The processes of a run, as one of them sees them; without arguments it is alone.

    Args:
        rank: of this process among all, from 0.
        world_size: how many there are.
        local_rank: of this process among those on its machine.
        launched: whether torchrun, or something like it, started this process.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    launched: bool = False

    @property
    def is_main(self) -> bool:
        """Whether this process prints, and writes the files: rank 0."""
        return self.rank == 0

    def mean(self, value: float) -> float:
        """The mean of the processes' values, the same on each."""
        return self._reduced(value, dist.ReduceOp.SUM, torch.float64) / self.world_size

    def largest(self, number: int) -> int:
        """The largest number of any process."""
        return int(self._reduced(number, dist.ReduceOp.MAX, torch.int64))

    def gathered(self, value: Value) -> list[Value]:
        """The values of all processes, by rank, on every process."""
        if not self.launched:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def from_main(self, value: Value) -> Value:
        """The value of rank 0, on every process."""
        return self.gathered(value)[0]

    def _reduced(self, value: float, operation: Any, dtype: torch.dtype) -> float:
        if not self.launched:
            return value
        tensor = torch.tensor(value, dtype=dtype)
        dist.all_reduce(tensor, operation)
        return tensor.item()


@contextmanager
def joined_processes() -> Iterator[Processes]:
    """The processes of this run, joined until the end.

    torchrun sets the variables RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Without RANK and WORLD_SIZE
    this process is alone. After an error in one process the others lose the connection, or torchrun ends them.

    Raises:
        ConnectionError: another process is lost.
    """
    if not is_launched():
        yield Processes()
        return
    rank, world_size, local_rank = (int(os.environ.get(name, "0")) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    group = Processes(rank, world_size, local_rank, launched=True)
    try:
        yield group
        # gloo may abort a process that still holds tensors of a group.
        gc.collect()
        group.largest(0)  # a barrier; torch's own would use nccl on a GPU
    except RuntimeError as error:
        if _is_a_lost_process(error):
            raise ConnectionError(
                f"lost another process of this run ({str(error).splitlines()[0]:.200}); continue with train.resume="
            ) from error
        raise
    dist.destroy_process_group()


def _is_a_lost_process(error: RuntimeError) -> bool:
    """Whether a collective failed: gloo raises a plain RuntimeError, from a file of its own."""
    named = ("gloo", "Connection closed by peer", "Connection reset by peer", "NCCL")
    return isinstance(error, dist.DistError) or any(text in str(error) for text in named)
