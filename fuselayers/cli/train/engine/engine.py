"""The engine of a training: one process, or several through PyTorch's DDP, FSDP2 and DTensor."""

import math
from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ....components import Model, parallelize
from ....configs import Config, FusionConfig
from ....configs.build import blocks_of, fuse_as
from ....partition.backends import WITH_CUDA_GRAPHS
from ...machine import choose_device
from .checkpointing import checkpoint_blocks
from .processes import ALONE, Processes


@dataclass(frozen=True)
class Engine:
    """A model, whole in this process or split over the processes of torchrun; see `start_engine`.

    Args:
        model: the module to call.
    """

    model: nn.Module
    processes: Processes = ALONE

    @property
    def module(self) -> nn.Module:
        """The model without DDP around it, with its parameters under their own names."""
        return self.model.module if isinstance(self.model, DistributedDataParallel) else self.model

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """A context for forward and backward of a micro-batch; only the last micro-batch of a step sends gradients."""
        if isinstance(self.model, DistributedDataParallel) and not last:
            return self.model.no_sync()
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_gradient_sync(last)
        return nullcontext()

    def clip(self, limit: float) -> Tensor:
        """Return the norm of the whole gradient, over all processes, and scale the gradient down to the limit.

        torch's `clip_grad_norm_` cannot mix tensors and DTensors of several meshes.

        Args:
            limit: above 0; infinity scales nothing.
        """
        groups: dict[object, list[nn.Parameter]] = defaultdict(list)
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
                groups[mesh].append(parameter)
        norms = [
            nn.utils.get_total_norm([parameter.grad for parameter in group if parameter.grad is not None])
            for group in groups.values()
        ]
        whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
        total = torch.stack([norm.square() for norm in whole]).sum().sqrt() if len(whole) > 1 else whole[0]
        if not math.isinf(limit):
            for group in groups.values():
                nn.utils.clip_grads_with_norm_(group, limit, total)
        return total


def device_of(config: Config, processes: Processes) -> torch.device:
    """The device of this process.

    Raises:
        ValueError: torch cannot use the device, or there are fewer GPUs than processes.
    """
    name = config.train.device
    if processes.launched and ":" in name:
        raise ValueError(
            f"train.device={name} is one device for {processes.world_size} processes; leave it at auto, so that each "
            "uses the GPU of its LOCAL_RANK, or set train.device=cpu"
        )
    device = choose_device(name, setting="train.device")
    if not processes.launched or device.type != "cuda":
        return device
    count = torch.cuda.device_count()
    if processes.local_rank >= count:
        raise ValueError(
            f"each process needs a GPU, and this machine has {count}; start torchrun with --nproc-per-node {count}, or "
            "set train.device=cpu"
        )
    device = torch.device("cuda", processes.local_rank)
    torch.cuda.set_device(device)
    return device


def start_engine(module: nn.Module, config: Config, *, processes: Processes, device: torch.device) -> Engine:
    """Split, checkpoint, fuse and shard a model, in this order; return the engine around it.

    Args:
        module: of `build`, without fusion of blocks, with the same weights on every process.

    Raises:
        ValueError: a component cannot be split over a tensor-parallel group, or a checkpointing does not fit.
    """
    parallel = config.parallel
    mesh = processes.mesh(device) if processes.launched else None
    if mesh is None or parallel.shard != "fsdp" or processes.tp > 1:
        # FSDP2 without tensor parallelism moves the weights to the device itself, in parts.
        module.to(device)
    if mesh is not None and processes.tp > 1:
        module = parallelize(cast(Model, module), mesh["tp"], sequence=parallel.sequence)
    if parallel.checkpointing in ("block", "selective"):
        checkpoint_blocks(module, parallel.checkpointing)
    fusion, _ = with_cuda_graphs(fusion_of(config), processes=processes, device=device)
    fuse_as(module, fusion)
    if mesh is not None and parallel.shard == "fsdp":
        _shard(module, mesh["dp"], config)
    if mesh is not None and parallel.shard == "ddp":
        module = DistributedDataParallel(module, device_ids=[device] if device.type == "cuda" else None)
    return Engine(module, processes)


def fusion_of(config: Config) -> FusionConfig:
    """Return the fusion of a run: a budget becomes its partition, and fsdp fuses blocks instead of the model.

    Raises:
        ValueError: a budget without fusion, or a checkpointing that torch cannot trace.
    """
    fusion, parallel = config.fusion, config.parallel
    if fusion.scope == "model" and parallel.shard == "fsdp":
        # One graph of the whole model would need all of its weights gathered at once.
        fusion = replace(fusion, scope="block", cuda_graphs=None)
    if parallel.tp > 1 and parallel.checkpointing in ("block", "selective") and fusion.scope != "none":
        # torch 2.13 cannot trace a checkpoint that draws numbers beside DTensors.
        raise ValueError(
            f"parallel.checkpointing={parallel.checkpointing} recomputes inside the blocks that fusion.scope="
            f"{fusion.scope} compiles, which torch cannot trace with parallel.tp above 1; set "
            "parallel.checkpointing=budget:0.5 or fusion=off"
        )
    if parallel.budget is None:
        return fusion
    if fusion.scope == "none":
        raise ValueError(
            f"parallel.checkpointing={parallel.budget} lets the fusion core choose what is kept, but fusion.scope is "
            "none; set fusion.scope=block or model, or parallel.checkpointing=block"
        )
    return replace(fusion, partition=parallel.budget)


def with_cuda_graphs(
    fusion: FusionConfig, *, processes: Processes, device: torch.device
) -> tuple[FusionConfig, str | None]:
    """Return the fusion of a run, with CUDA graphs where it can have them; without them also the reason.

    The user's setting is kept. Without one, a run of one process on a GPU gets CUDA graphs: its batches have one shape,
    and launching the kernels of a small model takes the host longer than running them takes the GPU.
    """
    if fusion.cuda_graphs is not None:
        return fusion, None if fusion.cuda_graphs else "fusion.cuda_graphs is false"
    if device.type != "cuda":
        return fusion, "they need a GPU"
    if fusion.scope == "none":
        return fusion, "nothing is fused; fusion=auto fuses"
    if fusion.backend not in ("auto", *WITH_CUDA_GRAPHS):
        return fusion, f"the backend {fusion.backend} captures none; fusion=auto does"
    if processes.launched:
        return fusion, "they were not tried with several processes; fusion.scope=model fusion.cuda_graphs=true tries"
    return replace(fusion, scope="model", cuda_graphs=True), None


def _shard(model: nn.Module, mesh: DeviceMesh, config: Config) -> None:
    policy = MixedPrecisionPolicy()
    if config.train.precision == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in blocks_of(model):
        # A stack never calls a reversible block itself, so its weights are gathered with the whole model's.
        if not getattr(block, "reversible", False):
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=config.parallel.reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy)
