"""Divided models in the wrappers of a trainer. Each function runs in every process of a group."""

import functools
import os
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as states
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import fuselayers as fl
from fuselayers.components import Model, parallelize
from tests.components.parallel.cases import COMPONENTS, Step, assert_same, batch_of, group, shipped, step


def _stacks(model: Model) -> list[nn.ModuleList]:
    return [module.blocks for module in model.modules() if isinstance(getattr(module, "blocks", None), nn.ModuleList)]


def _wrap_blocks(model: Model, wrap: Any) -> None:
    for blocks in _stacks(model):
        for number, block in enumerate(blocks):
            blocks[number] = wrap(block)


def engine(model: Model, name: str) -> nn.Module:
    """Return a model as a trainer would run it."""
    if name.endswith("compile"):
        for blocks in _stacks(model):
            for block in blocks:
                block.compile(fullgraph=True)
    # Around the compiled blocks: torch 2.13 cannot trace a checkpoint that draws random numbers beside DTensors.
    if name.startswith("checkpoint"):
        _wrap_blocks(model, checkpoint_wrapper)
    scope, _, backend = name.removeprefix("checkpoint ").partition(" ")
    if scope == "block":
        _wrap_blocks(model, functools.partial(fl.fuse, backend=backend))
    return fl.fuse(model, backend=backend) if scope == "model" else model


def made(name: str) -> Model:
    """Return a model of COMPONENTS or a shipped model, with the same weights in every process."""
    torch.manual_seed(0)
    return COMPONENTS[name]() if name in COMPONENTS else shipped(name)


def under(name: str, engines: list[str], sequence: bool, cache: str) -> list[str]:
    """Compare a divided model under each engine with one process; return the engines. `cache` is for Inductor."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    plain = made(name)
    batch = batch_of(plain)
    wanted = step(plain, batch)
    for number, engine_name in enumerate(engines):
        torch._dynamo.reset()
        fused_before = engine_name == "fused before"
        model = fl.fuse(made(name), backend="eager") if fused_before else made(name)
        divided = engine(parallelize(model, group(), sequence=sequence), engine_name)
        got = step(divided, batch)
        try:
            assert_same(wanted, got)
        except AssertionError as error:
            raise AssertionError(f"{engine_name}, number {number}: {error}") from error
    return engines


def data_parallel(name: str, sequence: bool) -> list[Step]:
    """Return two AdamW steps with FSDP on the first dimension of a 2 x n / 2 mesh and parallelize on the second.

    Data-parallel ranks have their own batches and seeds.
    """
    size = torch.distributed.get_world_size()
    world = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
    model = parallelize(made(name), world["tp"], sequence=sequence)
    rank = world["dp"].get_local_rank()
    batch = tuple(tensor.roll(rank, 0) for tensor in batch_of(model))
    for blocks in _stacks(model):
        for block in blocks:
            fully_shard(block, mesh=world["dp"])
    fully_shard(model, mesh=world["dp"])
    assert isinstance(model, FSDPModule)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    steps = []
    for number in range(2):
        optimizer.zero_grad()
        steps.append(step(model, batch, seed=100 * number + rank))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return steps


def trained(name: str, sequence: bool, steps: range, source: str | None, target: str | None) -> list[float]:
    """Train a model divided among all processes, from a checkpoint to a checkpoint; return the losses."""
    model = made(name)
    batch = batch_of(model)
    parallelize(model, group(), sequence=sequence)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if source is not None:
        of_model, of_optimizer = states.get_state_dict(model, optimizer)
        dcp.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=source)
        states.set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
    losses = []
    for number in steps:
        optimizer.zero_grad()
        losses.append(step(model, batch, seed=number).loss)
        optimizer.step()
    if target is not None:
        of_model, of_optimizer = states.get_state_dict(model, optimizer)
        dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=target)
    return losses
