"""parallelize under FSDP2, compilers, fuse, activation checkpointing and distributed checkpoints."""

from pathlib import Path

import pytest

from tests.components.parallel.cases import assert_same
from tests.components.parallel.engines import data_parallel, trained, under
from tests.components.parallel.ranks import run

# The second of two equal engines finds the first one's code in a warm cache. A rank that took another rank's code would
# drop other elements.
_COMPILED = ["compile", "compile", "block inductor", "block inductor", "model inductor", "model inductor"]


def _run(size: int, folder: Path, function: object, *arguments: object) -> list[object]:
    folder.mkdir()
    return run(size, function, *arguments, folder=folder, seconds=1200)  # type: ignore[arg-type]


@pytest.mark.slow
def test_graphs_of_blocks_keep_the_numbers(tmp_path: Path) -> None:
    engines = ["block eager"]
    for compared in _run(2, tmp_path / "run", under, "gated", engines, True, str(tmp_path / "cache")):
        assert compared == engines


# Each model divides different layers, and sequence parallelism puts other collectives around them.
@pytest.mark.slow
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("name", ["gated", "mixture", "pair"])
@pytest.mark.parametrize("sequence", [False, True])
def test_compilers_keep_the_numbers_with_a_cold_and_a_warm_cache(name: str, sequence: bool, tmp_path: Path) -> None:
    engines = [*_COMPILED, "model eager", "fused before", "checkpoint", "checkpoint compile"]
    for compared in _run(2, tmp_path / "run", under, name, engines, sequence, str(tmp_path / "cache")):
        assert compared == engines


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["gpt_nano", "gated"])
def test_fsdp_over_a_mesh_of_two_dimensions_keeps_the_numbers(name: str, tmp_path: Path) -> None:
    alone = _run(2, tmp_path / "two", data_parallel, name, False)
    for sequence in (False, True):
        divided = _run(4, tmp_path / f"four {sequence}", data_parallel, name, sequence)
        for rank, steps in enumerate(divided):
            for wanted, got in zip(alone[rank // 2], steps, strict=True):  # type: ignore[call-overload, index]
                assert_same(wanted, got, 1e-4)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["separate", "gated"])
def test_a_checkpoint_fits_a_group_of_another_size(name: str, tmp_path: Path) -> None:
    whole = _run(1, tmp_path / "whole", trained, name, False, range(6), None, None)[0]
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    losses = [
        *_run(2, tmp_path / "a", trained, name, True, range(2), None, first)[0],  # type: ignore[misc]
        *_run(4, tmp_path / "b", trained, name, False, range(2, 4), first, second)[0],  # type: ignore[misc]
        *_run(1, tmp_path / "c", trained, name, False, range(4, 6), second, None)[0],  # type: ignore[misc]
    ]
    assert losses == pytest.approx(whole, rel=1e-5)
