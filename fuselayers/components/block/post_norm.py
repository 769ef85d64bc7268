"""post_norm -- the stream is normalised after each sublayer has joined it, as in the first transformer and in BERT.

    x, y   [B, T, D]   B batch, T tokens, D model

    x = norm1(x + dropout(attention(x)))
    y = norm2(x + dropout(feedforward(x)))

Vaswani et al. 2017, section 3.1.
"""

from typing import ClassVar

from torch import Tensor

from ..attention.multi_head import Rotate
from ..registry import register
from .block import Block

__all__ = ["PostNormBlock"]


@register("block", "post_norm")
class PostNormBlock(Block):
    """Attention and feedforward, each followed by a norm of the stream it joined.

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
    >>> block = PostNormBlock(8, attention=Choice("multi_head", {"num_heads": 2}), causal=False)
    >>> block(torch.ones(1, 3, 8)).shape
    torch.Size([1, 3, 8])
    """

    final_norm: ClassVar[bool] = False

    def forward(self, x_BTD: Tensor, *, rotate: Rotate | None = None, key_padding_mask: Tensor | None = None) -> Tensor:
        """[B, T, D] -> [B, T, D]; `rotate` and `key_padding_mask` go to the attention."""
        gathered_BTD = self.attention(x_BTD, rotate=rotate, key_padding_mask=key_padding_mask)
        x_BTD = self.norm1.add(gathered_BTD, x_BTD, p=self.dropout, style="post")
        return self.norm2.add(self.feedforward(x_BTD), x_BTD, p=self.dropout, style="post")
