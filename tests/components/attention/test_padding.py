import pytest
import torch

from fuselayers.components import FourierMix, PoolingMix
from fuselayers.components.attention.padding import zero_padding


@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 5, 3, 4)])
def test_padding_becomes_zeros_and_has_no_gradient(shape: tuple[int, ...]) -> None:
    real_BT = torch.tensor([[True, True, False], [False, True, True]])
    x = torch.full(shape, torch.inf).requires_grad_()
    x.data.select(-2, 1).fill_(2.0)
    got = zero_padding(x, real_BT)
    expected = torch.where(real_BT.view(2, *([1] * (len(shape) - 3)), 3, 1), x.detach(), 0.0)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    (gradient,) = torch.autograd.grad(got.sum(), x)
    torch.testing.assert_close(gradient, (expected != 0).to(x.dtype), rtol=0, atol=0)
    assert zero_padding(x, None) is x


@pytest.mark.parametrize("mixer", [PoolingMix(4), FourierMix(4)])
def test_a_mask_that_does_not_fit(mixer: torch.nn.Module) -> None:
    text = (
        r"^key_padding_mask must be torch.bool \[2, 3\] to fit x \[2, 3, 4\], True for a real token, "
        r"got torch.float32 \[2, 3\]$"
    )
    with pytest.raises(ValueError, match=text):
        mixer(torch.zeros(2, 3, 4), key_padding_mask=torch.ones(2, 3))
