import pytest
import torch

from fuselayers.ops.rows import as_rows, elementwise_plan, persistent_programs, tile_of_rows, vector_of


@pytest.mark.parametrize(
    ("x", "copied"),
    [
        (torch.zeros(2, 3, 8), False),
        (torch.zeros(8), False),
        (torch.zeros(2, 3, 16)[..., :8], False),  # one half of a packed tensor
        (torch.zeros(6, 2, 8)[:, 1], False),
        (torch.zeros(1, 8).expand(6, 8), False),
        (torch.zeros(6, 2)[:, 1:], False),
        (torch.zeros(8, 6).t(), True),
        (torch.zeros(6, 16)[:, ::2], True),
        (torch.zeros(2, 4, 3, 8).transpose(1, 2), True),
    ],
)
def test_rows_are_copied_only_where_they_must_be(x: torch.Tensor, copied: bool) -> None:
    x = x + torch.arange(x.numel()).view(x.shape) if copied else x
    rows = as_rows(x)
    assert rows.shape == (x.numel() // x.shape[-1], x.shape[-1])
    assert rows.shape[1] == 1 or rows.stride(1) == 1
    assert (rows.data_ptr() == x.data_ptr()) is not copied or x.is_contiguous()
    assert torch.equal(rows, x.reshape(rows.shape))


def test_eight_neighbours_move_at_once_where_width_and_distances_allow_it() -> None:
    assert vector_of(8, 8, 1000) == 8
    assert vector_of(8, 8, 12) == 1
    assert vector_of(12, 16) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (512, 512), (8, 2048), (8, 12288), (100_000, 129)])
def test_a_tile_is_a_power_of_two_with_whole_groups_of_eight(shape: tuple[int, int], dtype: torch.dtype) -> None:
    plan = elementwise_plan(dtype.itemsize, *shape, shape[1])
    vector, rows, columns = plan.constants
    assert plan.sizes == (shape[0], shape[1] // vector, shape[1] // vector)
    assert plan.grid[0] * rows >= shape[0]
    assert plan.grid[1] * columns >= shape[1]
    assert rows & (rows - 1) == 0
    assert columns & (columns - 1) == 0
    assert columns >= 8
    assert rows * columns * dtype.itemsize <= 8192 or rows == 1


@pytest.mark.parametrize(
    ("shape", "split", "tile", "num_warps"),
    [
        ((4096, 1), False, (256, 8), 4),
        ((3, 7), False, (4, 8), 4),
        ((4096, 1000), False, (2, 1024), 4),
        ((4096, 4096), False, (1, 4096), 8),
        ((4096, 8192), False, (1, 8192), 16),
        ((4096, 8193), True, (1, 4096), 8),
    ],
)
def test_a_row_is_one_programs_as_long_as_it_fits(
    shape: tuple[int, int], split: bool, tile: tuple[int, int], num_warps: int
) -> None:
    assert tile_of_rows(*shape) == (split, *tile, num_warps)


def test_persistent_programs_are_those_that_run_at_a_time_and_no_more_than_the_tiles() -> None:
    assert persistent_programs(10_000, at_a_time=264) == 264
    assert persistent_programs(10_000, at_a_time=264, side_by_side=4) == 66
    assert persistent_programs(7, at_a_time=264) == 7
    assert persistent_programs(7, at_a_time=2, side_by_side=100) == 1
