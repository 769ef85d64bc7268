import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fuselayers.components import PoolingMix
from tests.components.attention import contract
from tests.components.attention.contract import HIDDEN_DIM, allowed


def reference(layer: PoolingMix, x_BTD: Tensor, rotate: object, real_BT: Tensor | None) -> Tensor:
    near = allowed(x_BTD.shape[1], real_BT, causal=layer.causal, window=layer.window)[:, 0].to(x_BTD.dtype)
    return near @ x_BTD / near.sum(-1, keepdim=True).clamp(min=1) - x_BTD


# A window lies inside the text, is cut at its ends, or is wider than the text. No mean counts padding.
@pytest.mark.parametrize(("tokens", "window"), [(1, 3), (7, 1), (7, 2), (7, 3), (7, 50), (129, 50)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_values_and_gradients(padded: bool, causal: bool, window: int, tokens: int) -> None:
    layer = PoolingMix(HIDDEN_DIM, window=window, causal=causal)
    contract.assert_is(layer, reference, tokens=tokens, padded=padded, tolerance=1e-6)


def test_it_is_the_pool_of_the_paper() -> None:
    x = torch.randn(2, 9, HIDDEN_DIM)
    pooled = F.avg_pool2d(x.mT[..., None], (3, 1), stride=1, padding=(1, 0), count_include_pad=False)[..., 0].mT
    torch.testing.assert_close(PoolingMix(HIDDEN_DIM, window=2, causal=False)(x), pooled - x)
