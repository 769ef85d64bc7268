"""pre_norm -- each sublayer sees a normalised stream, and the stream itself is never normalised.

    x, y   [B, T, D]   B batch, T tokens, D model

    x = x + dropout(attention(norm1(x)))
    y = x + dropout(feedforward(norm2(x)))

Xiong et al., "On layer normalization in the transformer architecture", 2020.
"""

from typing import ClassVar

from torch import Tensor

from ...ops import bias_dropout_residual
from ..attention.multi_head import Rotate
from ..registry import register
from .block import Block

__all__ = ["PreNormBlock"]


@register("block", "pre_norm")
class PreNormBlock(Block):
    """Attention and feedforward, each on the normalised stream. A stack of them needs a norm at its end.

    Args:
        hidden_dim: D, the width of the model.
        attention: the attention and its options.
        feedforward: the feedforward and its options.
        norm: the norm and its options.
        dropout: probability of dropping a value of a sublayer's output before it joins the residual stream.
        causal: whether a token looks only at itself and the tokens before it.
        backend: what the fused layers among the parts get as their backend; None leaves them unfused.
        partition: how they choose what is saved for backward.

    Raises:
        ValueError: an unknown name or option, sizes that do not fit, or a dropout outside [0, 1).

    >>> import torch
    >>> from fuselayers.components import Choice
    >>> block = PreNormBlock(8, attention=Choice("multi_head", {"num_heads": 2}), feedforward="fused_mlp")
    >>> block(torch.ones(1, 3, 8)).shape
    torch.Size([1, 3, 8])
    """

    final_norm: ClassVar[bool] = True

    def forward(self, x_BTD: Tensor, *, rotate: Rotate | None = None, key_padding_mask: Tensor | None = None) -> Tensor:
        """[B, T, D] -> [B, T, D]; `rotate` and `key_padding_mask` go to the attention."""
        gathered_BTD = self.attention(self.norm1(x_BTD), rotate=rotate, key_padding_mask=key_padding_mask)
        normed_BTD, x_BTD = self.norm2.add(gathered_BTD, x_BTD, p=self.dropout, style="prenorm")
        return bias_dropout_residual(self.feedforward(normed_BTD), x_BTD, p=self.dropout, training=self.training)
