"""Swapped models in DDP and both versions of FSDP, in one process and in two (gloo)."""

import functools
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from fuselayers.components.swap import fallbacks, unswap
from fuselayers.components.swap.blocks import repeated_blocks
from tests.components.parallel.cases import whole
from tests.components.parallel.ranks import run
from tests.components.swap.levels import both_levels, pair

STEPS: Final = 4


def sharded(model: nn.Module) -> nn.Module:
    """Shard each block by FSDP2, then the rest."""
    for _, block in repeated_blocks(model):
        fully_shard(block)
    return fully_shard(model)


def wrapped_by_class(model: nn.Module) -> nn.Module:
    """FSDP1, which wraps the modules of a class that the user names."""
    kinds = {getattr(type(block), "swapped_from", type(block)) for _, block in repeated_blocks(model)}
    policy: Any = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=kinds)
    wrapped = FullyShardedDataParallel(
        model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True
    )
    assert sum(isinstance(module, FullyShardedDataParallel) for module in wrapped.modules()) == 3
    return wrapped


CASES: Final[dict[str, Callable[[nn.Module], nn.Module]]] = {
    "FSDP2": sharded,
    "DDP": nn.parallel.DistributedDataParallel,
    "FSDP by class": wrapped_by_class,
}


def batches() -> list[dict[str, torch.Tensor]]:
    """The batches of this process. Each process has different batches."""
    generator = torch.Generator().manual_seed(10 + dist.get_rank())
    ids = torch.randint(3, 99, (STEPS + 1, 2, 12), generator=generator)
    return [{"input_ids": batch, "labels": batch} for batch in ids]


def train(model: nn.Module, *, is_swapped: bool) -> dict[str, Any]:
    """Train for some steps, the last one unswapped; return losses, norms of gradients, and the last parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, norms = [], []
    for number, batch in enumerate(batches()):
        if number == STEPS:
            assert fallbacks(model) == ()
            assert (unswap(model) > 0) == is_swapped
            assert not any(hasattr(type(module), "swapped_from") for module in model.modules())
        loss = model(**batch).loss
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        norms.append(whole(torch.nn.utils.get_total_norm(gradients)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    kinds = sorted({type(module).__name__ for module in model.modules()})
    parameters = [whole(parameter).detach().clone() for parameter in model.parameters()]
    return {"losses": torch.stack(losses), "norms": torch.stack(norms), "parameters": parameters, "classes": kinds}


def compared(name: str, case: str, level: str) -> dict[str, Any]:
    """Train a plain and a swapped model, and compare them; return the results of the swapped one."""
    plain, swapped = pair(name, level)
    wanted, got = (train(CASES[case](model), is_swapped=model is swapped) for model in (plain, swapped))
    assert got["classes"] == wanted["classes"]
    torch.testing.assert_close(got["losses"], wanted["losses"], atol=0.0, rtol=1e-5)
    torch.testing.assert_close(got["norms"], wanted["norms"], atol=0.0, rtol=1e-4)
    torch.testing.assert_close(got["parameters"], wanted["parameters"], atol=2e-5, rtol=0.0)
    gc.collect()
    return got


@pytest.mark.timeout(900)  # on a busy machine
@pytest.mark.usefixtures("group_of_one")
@both_levels
@pytest.mark.parametrize(
    "case",
    ["FSDP2", "DDP", pytest.param("FSDP by class", marks=pytest.mark.slow)],
)
def test_one_process(case: str, level: str) -> None:
    compared("llama", case, level)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("name", "level"), [("llama", "layers"), ("gpt2", "layers"), ("llama", "blocks")])
def test_two_processes(name: str, level: str, case: str, tmp_path: Path) -> None:
    first, second = run(2, compared, name, case, level, folder=tmp_path, seconds=850)
    assert not torch.equal(first["losses"], second["losses"]), "each process has batches of its own"
    for parameter, other in zip(first["parameters"], second["parameters"], strict=True):
        # FSDP1 shows each process its own shard.
        assert case == "FSDP by class" or torch.equal(parameter, other)
