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
from .checkpointing import checkpoint_blocks, fusion_of


def prepared(
    model: nn.Module, config: Config, *, data: DeviceMesh | None = None, tensor: DeviceMesh | None = None
) -> nn.Module:
    """A model as its run needs it, from one that is built without the fusion of blocks.

    Args:
        model: of `build`; its weights are the same on every process.
        config: of the run.
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
    fusion, _ = fusion_for(config)
    fuse_as(model, fusion)
    if parallel.shard == "fsdp" and data is not None:
        _shard(model, data, config)
    return model


def fusion_for(config: Config) -> tuple[FusionConfig, str | None]:
    """The fusion of a run, and a line about what differs from the config's, or None."""
    fusion = fusion_of(config)
    if config.parallel.shard == "fsdp" and fusion.scope == "model":
        # One graph of the whole model would need all of its weights gathered at once.
        return replace(fusion, scope="block"), "fsdp gathers the weights of one block at a time: fusion.scope is block"
    return fusion, None


def _shard(model: nn.Module, mesh: DeviceMesh, config: Config) -> None:
    policy = MixedPrecisionPolicy()
    if config.train.precision == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in blocks_of(model):
        # A stack never calls a reversible block, so that its weights belong to the whole model's.
        if not getattr(block, "reversible", False):
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=config.parallel.reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy)
