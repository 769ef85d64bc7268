import pytest
import torch

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
