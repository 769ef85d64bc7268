import re

import pytest

from fuselayers.cli.train.engine import Grid, Processes, grid_of
from fuselayers.configs import compose


@pytest.mark.parametrize(
    ("size", "rank", "overrides", "grid"),
    [
        (4, 3, ["parallel=fsdp"], Grid(4, 1, 3)),
        (4, 3, ["parallel.tp=4"], Grid(1, 4, 0)),
        (6, 5, ["parallel=fsdp", "parallel.dp=3", "parallel.tp=2", "train.batch_size=9"], Grid(3, 2, 2)),
    ],
)
def test_the_grid_of_the_processes(size: int, rank: int, overrides: list[str], grid: Grid) -> None:
    assert grid_of(compose(overrides=overrides), Processes(rank, size, launched=True)) == grid


def test_every_row_is_computed_by_one_data_parallel_group() -> None:
    rows = [list(range(12))[Grid(3, 2, rank).rows(12)] for rank in range(3)]
    assert rows == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


@pytest.mark.parametrize(
    ("size", "overrides", "text"),
    [
        (
            1,
            ["parallel.dp=2"],
            "parallel.dp=2 x parallel.tp=1 need 2 processes, but torchrun started 1; start torchrun",
        ),
        (
            3,
            ["parallel=fsdp", "parallel.tp=2"],
            "parallel.tp=2 needs a multiple of 2 processes, but torchrun started 3",
        ),
        (4, [], "there are 4 processes, 4 of them for data; set parallel.shard=ddp (each keeps all weights) or paral"),
        (4, ["parallel=ddp", "parallel.tp=2"], "parallel.shard=ddp cannot hold weights that are split by tensor para"),
        (2, ["parallel=ddp", "parallel.tp=2"], "with parallel.tp=2 set parallel.shard=none"),
        (3, ["parallel=ddp", "train.batch_size=8"], "train.batch_size=8 is split over parallel.dp=3 groups and must"),
    ],
)
def test_a_world_that_does_not_fit(size: int, overrides: list[str], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        grid_of(compose(overrides=overrides), Processes(world_size=size, launched=True))


def test_one_process_without_torchrun_says_so() -> None:
    text = r"^parallel\.dp=2 x parallel\.tp=1 need 2 processes, but this run is a single process, without torchrun; st"
    with pytest.raises(ValueError, match=text):
        grid_of(compose(overrides=["parallel=ddp", "parallel.dp=2"]), Processes())
