import re

import pytest

from fuselayers.cli.train.engine import Processes, grouped
from fuselayers.configs import compose


@pytest.mark.parametrize(
    ("size", "rank", "overrides", "grid"),
    [
        (4, 3, ["parallel=fsdp"], (4, 1, 3)),
        (4, 3, ["parallel.tp=4"], (1, 4, 0)),
        (6, 5, ["parallel=fsdp", "parallel.dp=3", "parallel.tp=2", "train.batch_size=9"], (3, 2, 2)),
    ],
)
def test_the_grid_of_the_processes(size: int, rank: int, overrides: list[str], grid: tuple[int, ...]) -> None:
    processes = grouped(compose(overrides=overrides), Processes(rank, size, launched=True))
    assert (processes.dp, processes.tp, processes.data_rank) == grid


def test_every_row_is_computed_by_one_data_parallel_group() -> None:
    rows = [list(range(12))[Processes(rank, 6, tp=2).rows(12)] for rank in range(6)]
    assert rows[::2] == rows[1::2] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


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
        grouped(compose(overrides=overrides), Processes(world_size=size, launched=True))


def test_one_process_without_torchrun_says_so() -> None:
    text = r"^parallel\.dp=2 x parallel\.tp=1 need 2 processes, but this run is a single process, without torchrun; st"
    with pytest.raises(ValueError, match=text):
        grouped(compose(overrides=["parallel=ddp", "parallel.dp=2"]), Processes())
