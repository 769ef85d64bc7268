"""Swapped models in DDP and both versions of FSDP, in one process and in two (gloo)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.components.parallel.ranks import run
from tests.components.swap.levels import both_levels
from tests.components.swap.ranks import CASES, run_case, run_cases


@pytest.fixture
def _group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def assert_alike(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert got["classes"] == wanted["classes"]
    torch.testing.assert_close(got["losses"], wanted["losses"], atol=0.0, rtol=1e-5)
    torch.testing.assert_close(got["norms"], wanted["norms"], atol=0.0, rtol=1e-4)
    for parameter, other in zip(got["parameters"], wanted["parameters"], strict=True):
        torch.testing.assert_close(parameter, other, atol=2e-5, rtol=0.0)


@pytest.mark.timeout(900)  # on a busy machine
@pytest.mark.usefixtures("_group_of_one")
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
