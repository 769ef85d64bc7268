"""parallelize under FSDP2, compilers, fuse, activation checkpointing and distributed checkpoints.

The functions before the tests run in every process of a group.
"""

import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as states
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import fuselayers as fl
from fuselayers.components import Model, parallelize
from tests.components.parallel.cases import Step, assert_same, batch_of, group, made, step
from tests.components.parallel.ranks import run


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


def under(name: str, engines: list[str], sequence: bool, cache: str) -> None:
    """Compare a divided model under each engine with one process. `cache` is for Inductor."""
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


# The second of two equal engines finds the first one's code in a warm cache. A rank that took another rank's code would
# drop other elements.
_COMPILED = ["compile", "compile", "block inductor", "block inductor", "model inductor", "model inductor"]


def _run(size: int, folder: Path, function: object, *arguments: object) -> list[object]:
    folder.mkdir()
    return run(size, function, *arguments, folder=folder, seconds=1200)


# Each model divides different layers, and sequence parallelism puts other collectives around them.
@pytest.mark.slow
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("name", ["gated", "mixture", "pair"])
@pytest.mark.parametrize("sequence", [False, True])
def test_compilers_keep_the_numbers_with_a_cold_and_a_warm_cache(name: str, sequence: bool, tmp_path: Path) -> None:
    engines = [*_COMPILED, "block eager", "model eager", "fused before", "checkpoint", "checkpoint compile"]
    _run(2, tmp_path / "run", under, name, engines, sequence, str(tmp_path / "cache"))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["gpt_nano", "gated"])
def test_fsdp_over_a_mesh_of_two_dimensions_keeps_the_numbers(name: str, tmp_path: Path) -> None:
    alone = _run(2, tmp_path / "two", data_parallel, name, False)
    for sequence in (False, True):
        divided = _run(4, tmp_path / f"four {sequence}", data_parallel, name, sequence)
        for rank, steps in enumerate(divided):
            for wanted, got in zip(alone[rank // 2], steps, strict=True):
                assert_same(wanted, got, 1e-4)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["separate", "gated"])
def test_a_checkpoint_fits_a_group_of_another_size(name: str, tmp_path: Path) -> None:
    whole = _run(1, tmp_path / "whole", trained, name, False, range(6), None, None)[0]
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    losses = [
        *_run(2, tmp_path / "a", trained, name, True, range(2), None, first)[0],
        *_run(4, tmp_path / "b", trained, name, False, range(2, 4), first, second)[0],
        *_run(1, tmp_path / "c", trained, name, False, range(4, 6), second, None)[0],
    ]
    assert losses == pytest.approx(whole, rel=1e-5)
