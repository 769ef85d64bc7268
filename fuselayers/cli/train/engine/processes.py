"""The processes of a run: this one alone, or those that torchrun started.

They communicate through a process group: gloo for numbers on the CPU, nccl for tensors on GPUs.
"""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ....configs import Config
from ...torchrun import is_launched

Value = TypeVar("Value")


@dataclass(frozen=True)
class Processes:
    """The processes of a run, as one of them sees them; without arguments it is alone.

    They form a grid: data-parallel groups of tensor-parallel processes. rank = data_rank * tp + rank within the group.

    Args:
        rank: of this process among all, from 0.
        world_size: how many there are.
        local_rank: of this process among those on its machine.
        launched: whether torchrun, or something like it, started this process.
        tp: processes of a tensor-parallel group. They compute the same rows together.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    launched: bool = False
    tp: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process prints, and writes the files: rank 0."""
        return self.rank == 0

    @property
    def dp(self) -> int:
        """The number of data-parallel groups. Each takes its rows of every batch."""
        return self.world_size // self.tp

    @property
    def data_rank(self) -> int:
        """The data-parallel group of this process."""
        return self.rank // self.tp

    def rows(self, batch_size: int) -> slice:
        """The rows of a batch that this process computes."""
        size = batch_size // self.dp
        return slice(self.data_rank * size, (self.data_rank + 1) * size)

    def mesh(self, device: torch.device) -> DeviceMesh:
        """The device mesh, with the dimensions "dp" and "tp". It needs the process group."""
        return init_device_mesh(device.type, (self.dp, self.tp), mesh_dim_names=("dp", "tp"))

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


ALONE: Final = Processes()


def grouped(config: Config, processes: Processes) -> Processes:
    """The processes in the groups that a config asks for.

    Raises:
        ValueError: it does not fit the number of processes, or batches cannot be split into its groups.
    """
    parallel, world_size = config.parallel, processes.world_size
    dp = parallel.dp or max(1, world_size // parallel.tp)
    if dp * parallel.tp != world_size:
        asked = f"parallel.dp={dp} x parallel.tp={parallel.tp} need {dp * parallel.tp} processes"
        if not parallel.dp:
            asked = f"parallel.tp={parallel.tp} needs a multiple of {parallel.tp} processes"
        there = (
            f"torchrun started {world_size}" if processes.launched else "this run is a single process, without torchrun"
        )
        raise ValueError(
            f"{asked}, but {there}; start torchrun --nproc-per-node {dp * parallel.tp} -m fuselayers train, or change "
            "parallel.dp= and parallel.tp="
        )
    if dp > 1 and parallel.shard == "none":
        raise ValueError(
            f"parallel.shard=none trains one copy of the model, but there are {world_size} processes, {dp} of them for "
            "data; set parallel.shard=ddp (each keeps all weights) or parallel.shard=fsdp (each keeps a part)"
        )
    if parallel.tp > 1 and parallel.shard == "ddp":
        raise ValueError(
            "parallel.shard=ddp cannot hold weights that are split by tensor parallelism; with parallel.tp="
            f"{parallel.tp} set parallel.shard={'fsdp' if dp > 1 else 'none'}"
        )
    if config.train.batch_size % dp:
        raise ValueError(
            f"train.batch_size={config.train.batch_size} is split over parallel.dp={dp} groups and must be a multiple "
            f"of {dp}; set {-(-config.train.batch_size // dp) * dp}"
        )
    return replace(processes, tp=parallel.tp)


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
            first_sentence, *_ = str(error).splitlines()[0].split(". ")
            raise ConnectionError(
                f"lost another process, whose own error says why ({first_sentence:.200}); "
                "a run that has a checkpoint continues with train.resume="
            ) from error
        raise
    dist.destroy_process_group()


def _is_a_lost_process(error: RuntimeError) -> bool:
    """Whether a collective failed: gloo raises a plain RuntimeError, from a file of its own."""
    named = ("gloo", "Connection closed by peer", "Connection reset by peer", "NCCL")
    return isinstance(error, dist.DistError) or any(text in str(error) for text in named)
