"""From a config to the engine of its run."""

import torch
from torch.nn.parallel import DistributedDataParallel

from ....configs import Config
from ...machine import choose_device
from .engine import Engine
from .layout import Layout
from .processes import Processes
from .sharding import prepared
from .verify import verify


def device_of(config: Config, processes: Processes) -> torch.device:
    """The device of this process.

    Raises:
        ValueError: torch cannot use the device, or there are fewer GPUs than processes.
    """
    name = config.train.device
    if not processes.launched:
        return choose_device(name, setting="train.device")
    if ":" in name:
        raise ValueError(
            f"train.device={name} is one device for {processes.world_size} processes; leave it at auto, and each takes "
            "the GPU of its LOCAL_RANK, or set train.device=cpu"
        )
    device = choose_device(name, setting="train.device")
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count()
    if processes.local_rank >= count:
        there = f"there {'is' if count == 1 else 'are'} {count} on this machine"
        raise ValueError(
            f"each process needs a GPU, and {there}; start torchrun with --nproc-per-node {count}, or set "
            "train.device=cpu"
        )
    device = torch.device("cuda", processes.local_rank)
    torch.cuda.set_device(device)
    return device


def start_engine(
    module: torch.nn.Module, config: Config, *, processes: Processes, layout: Layout, device: torch.device
) -> Engine:
    """The engine of a run, around its model.

    Args:
        module: of `build`, without fusion of blocks, with the same weights on every process.
        config: of the run.
        processes: of the run.
        layout: of `layout_of`.
        device: of this process.

    Raises:
        ValueError: the model cannot be split or checkpointed so.
        RuntimeError: the model is not split as the config asks for.
    """
    if not processes.launched:
        return Engine(prepared(module.to(device), config))
    if config.parallel.shard != "fsdp" or layout.tp > 1:
        # FSDP2 alone takes the weights to the device in parts.
        module.to(device)
    mesh = layout.mesh(device)
    model = module = prepared(module, config, data=mesh["dp"], tensor=mesh["tp"])
    if config.parallel.shard == "ddp":
        model = DistributedDataParallel(module, device_ids=[device] if device.type == "cuda" else None)
    verify(module, model, config.parallel, layout)
    return Engine(module, model=model, processes=processes, layout=layout)
