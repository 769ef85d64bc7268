"""pre -- each sublayer sees a normalised stream, and the stream itself is never normalised.

    x   [B, T, D]   B batch, T tokens, D model

    x = x + dropout(attention(norm(x)))
    x = x + dropout(feedforward(norm(x)))

Xiong et al., "On layer normalization in the transformer architecture", 2020.
"""

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from ...ops import bias_dropout_residual
from ..registry import register
from .residual import Residual, Sublayer

__all__ = ["PreResidual"]


@register("residual", "pre")
class PreResidual(Residual):
    """A norm before each sublayer, as in GPT-2 and Llama. The end of the stack needs a norm.

    >>> import torch
    >>> residual = PreResidual(2)
    >>> residual(torch.tensor([[[1.0, 3.0]]]), [torch.neg, torch.zeros_like]).detach().round(decimals=2)
    tensor([[[2., 2.]]])
    """

    final_norm: ClassVar[bool] = True

    def forward(self, x_BTD: Tensor, sublayers: Sequence[Sublayer]) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        normed_BTD: Tensor = self.norm(0)(x_BTD)
        # A branch joins the stream in one op with the norm that follows.
        for number, sublayer in enumerate(sublayers[:-1]):
            y_BTD = self.branch(number, sublayer, normed_BTD)
            normed_BTD, x_BTD = self.norm(number + 1).add(y_BTD, x_BTD, p=self.dropout, style="prenorm")
        y_BTD = self.branch(len(sublayers) - 1, sublayers[-1], normed_BTD)
        return bias_dropout_residual(y_BTD, x_BTD, p=self.dropout, training=self.training)
