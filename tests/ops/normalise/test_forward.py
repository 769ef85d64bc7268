import pytest
import torch

from fuselayers.ops.normalise import norm_reference
from fuselayers.ops.normalise.forward import normalise_forward
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


@pytest.mark.kernels
@pytest.mark.parametrize("rms", [True, False])
def test_long_rows_of_bfloat16_err_no_more_than_twice_as_much_as_plain_torch(rms: bool) -> None:
    x, residual, weight = tensors((3, 9001), (3, 9001), (9001,), dtype=torch.bfloat16)
    y, *_ = normalise_forward(x, residual, None, weight, None, None, None, 0.0, 1e-5, False, rms)
    exact = norm_reference(x.double() + residual.double(), weight.double(), None, eps=1e-5, rms=rms)
    plain = norm_reference(x + residual, weight, None, eps=1e-5, rms=rms)
    assert (y.double() - exact).abs().max() <= 2 * (plain.double() - exact).abs().max()
