"""The grid of the processes: data-parallel groups of tensor-parallel processes."""

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ....configs import Config
from .processes import Processes


@dataclass(frozen=True)
class Grid:
    """The grid of the processes: rank = data_rank * tp + rank within the tensor-parallel group.

    Args:
        dp: data-parallel groups. Each takes its rows of every batch.
        tp: processes of a group. They compute the same rows together.
        data_rank: the group of this process.
    """

    dp: int = 1
    tp: int = 1
    data_rank: int = 0

    def rows(self, batch_size: int) -> slice:
        """The rows of a batch that this process computes."""
        size = batch_size // self.dp
        return slice(self.data_rank * size, (self.data_rank + 1) * size)

    def mesh(self, device: torch.device) -> DeviceMesh:
        """The device mesh, with the dimensions "dp" and "tp". It needs the process group."""
        return init_device_mesh(device.type, (self.dp, self.tp), mesh_dim_names=("dp", "tp"))


def grid_of(config: Config, processes: Processes) -> Grid:
    """The grid that a config asks for.

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
    return Grid(dp=dp, tp=parallel.tp, data_rank=processes.rank // parallel.tp)
