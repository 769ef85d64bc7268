"""pooling -- y = mean(x over neighbouring tokens) - x, as in PoolFormer, along one dimension.

    x, y   [B, T, D]   B batch, T tokens, D model

    y[t] = mean of x[s] over real tokens s with |t - s| < window, s <= t if causal, minus x[t]

Yu et al., "MetaFormer is actually what you need for vision", 2022, section 3.2.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checks import check_input, zero_padding
from ..option import Size, checked
from ..registry import register


@register("attention", "pooling")
class PoolingMix(nn.Module):
    """Mixes neighbouring tokens, without parameters. x is subtracted because the residual stream adds it again.

    Args:
        hidden_dim: D, the width of the model.
        window: the range in tokens, the token itself included: 2 is the paper's pool size of 3, one token on either
            side.
        causal: whether a token looks only at itself and the tokens before it.

    Raises:
        ValueError: a size is below one.

    >>> PoolingMix(1, window=2)(torch.tensor([[[1.0], [2.0], [6.0]]])).flatten().tolist()
    [0.5, 1.0, -2.0]
    """

    built_in: ClassVar[frozenset[str]] = frozenset({"causal"})

    @checked
    def __init__(self, hidden_dim: Size, *, window: Size = 2, causal: bool = False) -> None:
        super().__init__()
        self.hidden_dim = hidden_dim
        self.window = window
        self.causal = causal

    def forward(self, x_BTD: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Return the means of neighbours minus x.

        Args:
            x_BTD: [B, T, D].
            key_padding_mask: bool [B, T], True for a real token, False for padding, which is ignored. A token
                without a real neighbour becomes minus x.

        Raises:
            ValueError: x or the mask has another shape, or the mask is not bool.
        """
        check_input(x_BTD, self.hidden_dim, key_padding_mask)
        wide = torch.promote_types(x_BTD.dtype, torch.float32)
        real_1T1 = torch.ones_like(x_BTD[:1, :, :1], dtype=wide)
        real_BT1 = real_1T1 if key_padding_mask is None else key_padding_mask[..., None].to(wide)
        window = min(self.window, x_BTD.shape[1])
        # Both sums are divided by the width of the window, which cancels.
        pooled_BTD = _pooled(zero_padding(x_BTD, key_padding_mask), window, causal=self.causal)
        share_BT1 = _pooled(real_BT1, window, causal=self.causal)
        means_BTD = pooled_BTD / share_BT1.masked_fill(share_BT1 == 0, 1.0)
        return (means_BTD - x_BTD).to(x_BTD.dtype)

    def extra_repr(self) -> str:
        return f"hidden_dim={self.hidden_dim}, window={self.window}, causal={self.causal}"


def _pooled(x_BTD: Tensor, window: int, *, causal: bool) -> Tensor:
    """Return sums over the window, divided by its width: [B, T, D] -> [B, T, D]."""
    before_BDT = F.pad(x_BTD.transpose(1, 2), (window - 1, 0 if causal else window - 1))
    return F.avg_pool1d(before_BDT, window if causal else 2 * window - 1, stride=1).transpose(1, 2)
