import pytest
import torch

from tests.ops.contract import seed_of, tensors


# `pre` and `rms` leave out different outputs. opcheck compares the outputs with the fake ones.
@pytest.mark.kernels
@pytest.mark.parametrize("rms", [True, False])
@pytest.mark.parametrize("pre", [True, False])
def test_opcheck(pre: bool, rms: bool) -> None:
    x, residual, bias, weight, shift = tensors((3, 5), (3, 5), (5,), (5,), (5,))
    for arguments in (
        (x, residual, bias, weight, None if rms else shift, seed_of(), None, 0.3, 1e-5, pre, rms),
        (x, None, None, weight, None, None, None, 0.0, 1e-5, pre, rms),
    ):
        torch.library.opcheck(torch.ops.fuselayers.normalise.default, arguments)
