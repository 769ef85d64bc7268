import pytest
import torch

from fuselayers.ops.sums import sum_of_rows, sum_partials
from tests.ops.contract import DEVICE, tensors


@pytest.mark.parametrize("shape", [(5,), (1, 3), (16, 7), (17, 7), (2, 8, 3), (0, 4), (3, 0), (16, 0), (4, 5, 6)])
def test_it_is_the_sum_over_all_rows(shape: tuple[int, ...]) -> None:
    (x,) = tensors(shape)
    torch.testing.assert_close(sum_of_rows(x), x.flatten(0, -2).sum(0) if x.dim() > 1 else x)


def test_in_float32_at_least() -> None:
    x = torch.full((4096, 2), 1.0, dtype=torch.bfloat16)
    assert torch.equal(sum_of_rows(x), torch.full((2,), 4096.0))
    assert sum_of_rows(x.double()).dtype == torch.float64


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 8), (129, 3, 40), (300, 7), (2, 1, 33)])
def test_the_sums_of_programs_are_rounded_once(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    (partial,) = tensors(shape)
    partial = partial.to(DEVICE)
    sums = sum_partials(partial, dtype)
    assert (sums.dtype, sums.shape) == (dtype, shape[1:])
    torch.testing.assert_close(sums.float(), partial.double().sum(0).float(), rtol=torch.finfo(dtype).eps, atol=1e-4)
