import torch
import torch.nn.functional as F

from fuselayers.components import PoolingMix


def test_it_is_the_pool_of_the_paper() -> None:
    x = torch.randn(2, 9, 12)
    pooled = F.avg_pool2d(x.mT[..., None], (3, 1), stride=1, padding=(1, 0), count_include_pad=False)[..., 0].mT
    torch.testing.assert_close(PoolingMix(12, window=2, causal=False)(x), pooled - x)
