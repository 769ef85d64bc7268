"""A built model, split over processes: tensor parallelism, checkpointing, fusion, FSDP2, in this order."""

from dataclasses import replace
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ....components import Model, parallelize
from ....configs import Config, FusionConfig
from ....configs.build import blocks_of, fuse_as
from .checkpointing import checkpoint_blocks


def prepared(
    model: nn.Module, config: Config, *, data: DeviceMesh | None = None, tensor: DeviceMesh | None = None
) -> nn.Module:
    """Split, checkpoint and fuse a model that was built without fusion.

    Args:
        model: of `build`; its weights are the same on every process.
        data: the data-parallel mesh, for fsdp.
        tensor: the mesh of the tensor-parallel group.

    Raises:
        ValueError: a component that cannot be split over a tensor-parallel group, or a checkpointing that does not fit.
    """
    parallel = config.parallel
    if tensor is not None and tensor.size() > 1:
        model = parallelize(cast(Model, model), tensor, sequence=parallel.sequence)
    if parallel.checkpointing in ("block", "selective"):
        checkpoint_blocks(model, parallel.checkpointing)
    fuse_as(model, fusion_of(config))
    if parallel.shard == "fsdp" and data is not None:
        _shard(model, data, config)
    return model


def fusion_of(config: Config) -> FusionConfig:
    """Return the fusion of a run: a budget becomes its partition, and fsdp fuses blocks instead of the model.

    Raises:
        ValueError: a budget without fusion, or a checkpointing that torch cannot trace.
    """
    fusion, parallel = config.fusion, config.parallel
    if fusion.scope == "model" and parallel.shard == "fsdp":
        # One graph of the whole model would need all of its weights gathered at once.
        fusion = replace(fusion, scope="block")
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


def _shard(model: nn.Module, mesh: DeviceMesh, config: Config) -> None:
    policy = MixedPrecisionPolicy()
    if config.train.precision == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in blocks_of(model):
        # A stack never calls a reversible block itself, so its weights are gathered with the whole model's.
        if not getattr(block, "reversible", False):
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=config.parallel.reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy)
