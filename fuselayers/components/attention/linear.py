"""linear -- attention with elu(x) + 1 as the feature map. Its cost grows linearly with the tokens.

    x, y   [B, T, D]      B batch, T tokens, D model
    q      [B, H, T, C]   H query heads, C channels of a head
    k, v   [B, G, T, C]   G key-value heads; query head h uses key-value head h // (H / G)

    phi(x) = elu(x) + 1
    y[t]   = out(sum_s (phi(q[t]) . phi(k[s])) v[s] / sum_s (phi(q[t]) . phi(k[s])))     over s <= t if causal

Katharopoulos et al., "Transformers are RNNs: fast autoregressive transformers with linear attention", 2020.
"""

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from ..option import Size, checked
from ..registry import register
from .inputs import Rotate
from .kernel_sums import kernel_attention
from .packed_heads import PackedHeads


@register("attention", "linear")
class LinearAttention(PackedHeads):
    """Attention without a softmax. Its time and memory grow linearly with the number of tokens.

    It has no dropout: attention probabilities are never computed individually, and the paper drops none.

    The arguments and errors of `PackedHeads`, and:

    Args:
        causal: whether a token looks only at itself and the tokens before it.

    >>> LinearAttention(8, num_heads=4, num_kv_heads=2).qkv.out_features
    16
    """

    built_in: ClassVar[frozenset[str]] = frozenset({"causal"})
    shown: ClassVar[tuple[str, ...]] = ("causal",)

    @checked
    def __init__(
        self,
        hidden_dim: Size,
        *,
        num_heads: Size,
        num_kv_heads: Size | None = None,
        head_dim: Size | None = None,
        bias: bool = True,
        causal: bool = False,
    ) -> None:
        super().__init__(hidden_dim, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, bias=bias)
        self.causal = causal

    def forward(self, x_BTD: Tensor, *, rotate: Rotate | None = None, key_padding_mask: Tensor | None = None) -> Tensor:
        """[B, T, D] -> [B, T, D]; the arguments of `PackedHeads.forward`.

        `rotate` turns only the features in the numerator, so that the weights depend on distances and the denominator
        stays positive (Su et al., "RoFormer", 2021, equation 19).
        """
        q_BHTC, k_BGTC, v_BGTC = self.project(x_BTD, key_padding_mask)
        mixed_BHTC = kernel_attention(
            *(q_BHTC, k_BGTC, v_BGTC, _features), causal=self.causal, key_padding_mask=key_padding_mask, rotate=rotate
        )
        return self.join(mixed_BHTC)


def _features(q_BHTC: Tensor, k_BGTC: Tensor) -> tuple[Tensor, Tensor, None]:
    return _phi(q_BHTC), _phi(k_BGTC), None


def _phi(x: Tensor) -> Tensor:
    """Return elu(x) + 1."""
    # Not torch's elu: the strides of its gradient differ from those its meta function reports, and traced views of it
    # fail. At 0 the slope comes from x - positive. A clamp in its place has slope 1 there before torch 2.14, and 0
    # since.
    positive = F.relu(x)
    return positive + (x - positive).exp()
