"""post -- the stream is normalised after each sublayer has joined it, as in the first transformer and in BERT.

    x   [B, T, D]   B batch, T tokens, D model

    x = norm(x + dropout(attention(x)))
    x = norm(x + dropout(feedforward(x)))

Vaswani et al. 2017, section 3.1.
"""

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from ..registry import register
from .residual import Residual, Sublayer

__all__ = ["PostResidual"]


@register("residual", "post")
class PostResidual(Residual):
    """A norm after each sublayer has joined the stream. Deep stacks of it need a warm-up of the learning rate.

    >>> import torch
    >>> residual = PostResidual(2)
    >>> residual(torch.tensor([[[1.0, 3.0]]]), [torch.zeros_like, torch.neg]).abs().max().item()
    0.0
    """

    final_norm: ClassVar[bool] = False

    def forward(self, x_BTD: Tensor, sublayers: Sequence[Sublayer]) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        for number, sublayer in enumerate(sublayers):
            y_BTD = self.branch(number, sublayer, x_BTD)
            x_BTD = self.norm(number).add(y_BTD, x_BTD, p=self.dropout, style="post")
        return x_BTD
