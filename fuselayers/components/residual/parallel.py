"""parallel -- all sublayers see one normalised stream and join it side by side, as in GPT-J and PaLM.

    x   [B, T, D]   B batch, T tokens, D model

    n = norm(x)
    x = x + dropout(attention(n)) + dropout(feedforward(n))

Wang, Komatsuzaki, "GPT-J-6B", 2021; Chowdhery et al., "PaLM", 2022, section 2.
"""

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from ...ops import bias_dropout_residual
from ..registry import register
from .residual import Residual, Sublayer

__all__ = ["ParallelResidual"]


@register("residual", "parallel")
class ParallelResidual(Residual):
    """One norm per block; its sublayers do not wait for each other. The end of the stack needs a norm.

    >>> len(ParallelResidual(8).norms)
    1
    """

    final_norm: ClassVar[bool] = True

    @staticmethod
    def num_norms(num_sublayers: int) -> int:
        """Return one."""
        return 1

    def forward(self, x_BTD: Tensor, sublayers: Sequence[Sublayer]) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        normed_BTD: Tensor = self.norm(0)(x_BTD)
        for number, sublayer in enumerate(sublayers):
            y_BTD = self.branch(number, sublayer, normed_BTD)
            x_BTD = bias_dropout_residual(y_BTD, x_BTD, p=self.dropout, training=self.training)
        return x_BTD
