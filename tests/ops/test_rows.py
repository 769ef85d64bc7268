from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fuselayers import ops
from fuselayers.ops import rows as module
from fuselayers.ops.implementations.launch import recorded_launches
from fuselayers.ops.implementations.triton_language import HAS_TRITON
from fuselayers.ops.rows import as_rows, elementwise_plan, tile_of_rows, vector_of
from tests.ops.contract import DEVICE, tensors


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
    assert plan.grid[1] * plan.grid[2] * columns >= shape[1]
    assert rows & (rows - 1) == 0
    assert columns & (columns - 1) == 0
    assert columns >= 8
    assert rows * columns * dtype.itemsize <= 8192 or rows == 1


# The largest grid in y, one tile more, and the widest row that kernels take.
@pytest.mark.parametrize("width", [65535 * 2048, 65535 * 2048 + 1, 1 << 28, 2**31 - 2**16])
def test_a_row_of_any_width_fits_into_the_grid(width: int) -> None:
    grid = elementwise_plan(2, 1, width, width).grid
    assert max(grid[1:]) <= 65535
    assert width <= grid[1] * grid[2] * 2048 < 2**31


def _seed(x: Tensor) -> Tensor:
    return torch.tensor(7, device=x.device)


def _classes(x: Tensor) -> Tensor:
    return torch.zeros(len(x), dtype=torch.int64, device=x.device)


# Every op with an elementwise kernel, of rows, a bias and a backend.
ELEMENTWISE: dict[str, Callable[[Tensor, Tensor, str], Tensor]] = {
    "dropout": lambda x, bias, backend: ops.dropout(x, 0.3, seed=_seed(x), backend=backend),
    "bias_activation_dropout": lambda x, bias, backend: ops.bias_activation_dropout(
        x, bias, activation="relu", p=0.3, seed=_seed(x), backend=backend
    ),
    "bias_dropout_residual": lambda x, bias, backend: ops.bias_dropout_residual(
        x, x, bias=bias, p=0.3, seed=_seed(x), backend=backend
    ),
    "gated_activation": lambda x, bias, backend: ops.gated_activation(x, x, activation="relu", backend=backend),
    "cross_entropy": lambda x, bias, backend: ops.cross_entropy(x, _classes(x), backend=backend),
}
elementwise_ops = pytest.mark.parametrize("op", ELEMENTWISE.values(), ids=ELEMENTWISE)


def results_of(op: Callable[[Tensor, Tensor, str], Tensor], x: Tensor, backend: str) -> list[Tensor]:
    """The result of an op, and its gradients."""
    given = [one.detach().requires_grad_() for one in (x, x[0])]
    y = op(*given, backend)
    return [y, *torch.autograd.grad(y, given, torch.ones_like(y), allow_unused=True, materialize_grads=True)]


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
@elementwise_ops
def test_a_flat_tensor_fits_into_every_grid(op: Callable[[Tensor, Tensor, str], Tensor]) -> None:
    with recorded_launches() as launches:
        results_of(op, torch.empty(1, 1 << 28, dtype=torch.bfloat16, device="meta"), "triton")
    assert len(launches) >= 2
    for one in launches:
        assert one.grid[0] < 1 << 31
        assert max(one.grid[1:], default=1) <= 65535


@pytest.mark.kernels
@elementwise_ops
def test_every_layer_of_a_grid_has_its_columns(
    op: Callable[[Tensor, Tensor, str], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    (x,) = tensors((2, 6 * 2048 + 5))
    expected = results_of(op, x, "triton")
    monkeypatch.setattr(module, "_MOST_PROGRAMS", 3)
    elementwise_plan.cache_clear()
    try:
        assert elementwise_plan(4, *x.shape, x.stride(0)).grid == (2, 3, 3)
        found = results_of(op, x, "triton")
    finally:
        elementwise_plan.cache_clear()
    assert all(map(torch.equal, found, expected))


@pytest.mark.kernels
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
@elementwise_ops
def test_a_flat_tensor_on_a_gpu(op: Callable[[Tensor, Tensor, str], Tensor]) -> None:
    x = torch.randn(1, 65535 * 2048 + 8, dtype=torch.bfloat16, device=DEVICE)
    torch.testing.assert_close(results_of(op, x, "triton"), results_of(op, x, "eager"))


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
