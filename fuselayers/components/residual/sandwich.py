"""sandwich -- a norm before each sublayer and one behind it, before it joins the stream.

    x   [B, T, D]   B batch, T tokens, D model

    x = x + norm(dropout(attention(norm(x))))
    x = x + norm(dropout(feedforward(norm(x))))

LayerScale and stochastic depth act on the output of the second norm, which would undo them before it.

Ding et al., "CogView", 2021, section 2.4; Gemma 2.
"""

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from ...ops import dropout
from ..registry import register
from .residual import Residual, Sublayer

__all__ = ["SandwichResidual"]


@register("residual", "sandwich")
class SandwichResidual(Residual):
    """Norms on both sides of each sublayer, as in Gemma 2. The end of the stack needs a norm.

    >>> len(SandwichResidual(8).norms)
    4
    """

    final_norm: ClassVar[bool] = True

    @staticmethod
    def num_norms(num_sublayers: int) -> int:
        """Return two for each sublayer."""
        return 2 * num_sublayers

    def forward(self, x_BTD: Tensor, sublayers: Sequence[Sublayer]) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        for number, sublayer in enumerate(sublayers):
            y_BTD, behind = sublayer(self.norm(2 * number)(x_BTD)), self.norm(2 * number + 1)
            if len(self.scales) or (self.training and self.skipped > 0):
                normed_BTD = behind(dropout(y_BTD, self.dropout, training=self.training))
                x_BTD = x_BTD + self.scaled(number, normed_BTD)
            else:
                x_BTD = behind.add(y_BTD, x_BTD, p=self.dropout, style="pre")
        return x_BTD
