import pytest
import torch

from fuselayers.ops.normalise.backward import normalise_backward
from fuselayers.ops.normalise.forward import normalise_forward
from tests.ops.contract import seed_of, tensors

pytestmark = pytest.mark.kernels


@pytest.mark.parametrize("rms", [True, False])
def test_opcheck(rms: bool) -> None:
    dy, s, weight, rows = tensors((3, 5), (3, 5), (5,), (3,))
    mean = rows[:0] if rms else rows
    for arguments in (
        (
            dy,
            dy,
            s,
            weight,
            mean,
            rows.abs(),
            seed_of(),
            None,
            0.3,
            rms,
            not rms,
            True,
            torch.bfloat16,
            torch.float32,
            torch.bfloat16,
        ),
        (dy, None, s, weight, mean, rows.abs(), None, None, 0.0, rms, False, False, torch.float32, None, None),
    ):
        torch.library.opcheck(torch.ops.fuselayers.normalise_backward.default, arguments)


@pytest.mark.parametrize("shape", [(37, 40), (3, 9001)], ids=str)
def test_the_same_bits_every_time(shape: tuple[int, int]) -> None:
    x, residual, weight, bias, dy = tensors(shape, shape, shape[1:], shape[1:], shape)
    _, s, mean, rstd = normalise_forward(x, residual, bias, weight, bias, seed_of(), None, 0.3, 1e-5, False, False)
    arguments = dy, None, s, weight, mean, rstd, seed_of(), None, 0.3, False, True, True, x.dtype, x.dtype, None
    first, second = normalise_backward(*arguments), normalise_backward(*arguments)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def test_sums_of_no_rows_are_zero() -> None:
    empty, weight = torch.empty(0, 8), torch.ones(8)
    *_, sums = normalise_backward(
        empty,
        None,
        empty,
        weight,
        empty[:, 0],
        empty[:, 0],
        None,
        None,
        0.0,
        False,
        True,
        True,
        torch.float32,
        None,
        None,
    )
    assert torch.equal(sums, torch.zeros(3, 8))
