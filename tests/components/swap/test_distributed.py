"""Swapped models in DDP and both versions of FSDP, in one process and in two (gloo)."""

import copy
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
from torch.distributed.tensor import DTensor

from fuselayers.components.swap import fallbacks, unswap
from fuselayers.components.swap.blocks import repeated_blocks
from tests.components.parallel.ranks import run
from tests.components.swap.levels import both_levels, pair

STEPS: Final = 4


def sharded(model: nn.Module) -> nn.Module:
    """Shard each block by FSDP2, then the rest."""
    for _, block in repeated_blocks(model):
        fully_shard(block)
    wrapped: nn.Module = fully_shard(model)
    return wrapped


def data_parallel(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def wrapped_by_class(model: nn.Module) -> nn.Module:
    """FSDP1, which wraps the modules of a class that the user names."""
    kinds = {getattr(type(block), "swapped_from", type(block)) for _, block in repeated_blocks(model)}

    def policy(**options: Any) -> bool:
        return transformer_auto_wrap_policy(transformer_layer_cls=kinds, **options)

    wrapped = FullyShardedDataParallel(
        model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True
    )
    assert sum(isinstance(module, FullyShardedDataParallel) for module in wrapped.modules()) == 3
    return wrapped


CASES: Final[dict[str, Callable[[nn.Module], nn.Module]]] = {
    "FSDP2": sharded,
    "DDP": data_parallel,
    "FSDP by class": wrapped_by_class,
}


def batches() -> list[dict[str, torch.Tensor]]:
    """The batches of this process. Each process has different batches."""
    generator = torch.Generator().manual_seed(10 + dist.get_rank())
    ids = torch.randint(3, 99, (STEPS + 1, 2, 12), generator=generator)
    return [{"input_ids": batch, "labels": batch} for batch in ids]


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor().detach() if isinstance(value, DTensor) else value.detach()


def run_case(name: str, case: str, level: str | None) -> dict[str, Any]:
    """Train for some steps, the last one unswapped; return losses, norms of gradients, and the last parameters."""
    plain, swapped = pair(name, level or "layers")
    model = CASES[case](plain if level is None else swapped)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, norms = [], []
    for number, batch in enumerate(batches()):
        if number == STEPS and level is not None:
            assert fallbacks(model) == ()
            assert unswap(model) > 0
            assert not any(hasattr(type(module), "swapped_from") for module in model.modules())
        loss = model(**batch).loss
        loss.backward()
        norm = torch.stack(
            [whole(parameter.grad).norm() for parameter in model.parameters() if parameter.grad is not None]
        ).norm()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        norms.append(norm)
    kinds = sorted({type(module).__name__ for module in model.modules()})
    parameters = [copy.deepcopy(whole(parameter)) for parameter in model.parameters()]
    result = {"losses": torch.stack(losses), "norms": torch.stack(norms), "parameters": parameters, "classes": kinds}
    del model, optimizer, plain, swapped
    gc.collect()
    return result


def run_cases(name: str, level: str) -> dict[tuple[str, str | None], dict[str, Any]]:
    """Run each case with the plain and with the swapped model."""
    return {(case, how): run_case(name, case, how) for case in CASES for how in (None, level)}


def assert_alike(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert got["classes"] == wanted["classes"]
    torch.testing.assert_close(got["losses"], wanted["losses"], atol=0.0, rtol=1e-5)
    torch.testing.assert_close(got["norms"], wanted["norms"], atol=0.0, rtol=1e-4)
    for parameter, other in zip(got["parameters"], wanted["parameters"], strict=True):
        torch.testing.assert_close(parameter, other, atol=2e-5, rtol=0.0)


@pytest.mark.timeout(900)  # on a busy machine
@pytest.mark.usefixtures("group_of_one")
@both_levels
@pytest.mark.parametrize(
    "case",
    ["FSDP2", "DDP", pytest.param("FSDP by class", marks=pytest.mark.slow)],
)
def test_one_process(case: str, level: str) -> None:
    assert_alike(run_case("llama", case, level), run_case("llama", case, None))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "level"), [("llama", "layers"), ("gpt2", "layers"), ("llama", "blocks")])
def test_two_processes(name: str, level: str, tmp_path: Path) -> None:
    ranks = run(2, run_cases, name, level, folder=tmp_path, seconds=850)
    for case in CASES:
        for results in ranks:
            assert_alike(results[case, level], results[case, None])
        first, second = (results[case, level] for results in ranks)
        assert not torch.equal(first["losses"], second["losses"]), "each process has batches of its own"
        for parameter, other in zip(first["parameters"], second["parameters"], strict=True):
            # FSDP1 shows each process its own shard.
            assert case == "FSDP by class" or torch.equal(parameter, other)
