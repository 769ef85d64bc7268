"""deepnorm -- post, with the stream scaled up before each sum, so that a thousand layers can be trained.

    x   [B, T, D]   B batch, T tokens, D model

    x = norm(alpha x + dropout(attention(x)))
    x = norm(alpha x + dropout(feedforward(x))),   alpha = (2 num_layers)^(1/4)

Wang et al., "DeepNet: scaling transformers to 1,000 layers", 2022, figure 2. It belongs to the init scheme deepnorm,
which scales the weights of the branches down.
"""

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from ..ranges import Count, Positive, Probability, Size, in_range
from ..registry import Choice, register
from .residual import Residual, Sublayer

__all__ = ["DeepNormResidual"]


@register("residual", "deepnorm")
class DeepNormResidual(Residual):
    """A norm after each sum, of a stream that counts more than the branch.

    Args:
        alpha: the stream's factor; None for (2 num_layers)^(1/4), right for encoders and decoders by themselves.

    >>> DeepNormResidual(8, num_layers=8).alpha
    2.0
    """

    final_norm: ClassVar[bool] = False

    @in_range
    def __init__(
        self,
        hidden_dim: Size,
        *,
        norm: Choice | str = "layer_norm",
        num_sublayers: Size = 2,
        layer: Count = 0,
        num_layers: Size = 1,
        dropout: Probability = 0.0,
        layer_scale: Positive | None = None,
        stochastic_depth: Probability = 0.0,
        alpha: Positive | None = None,
    ) -> None:
        super().__init__(
            hidden_dim,
            norm=norm,
            num_sublayers=num_sublayers,
            layer=layer,
            num_layers=num_layers,
            dropout=dropout,
            layer_scale=layer_scale,
            stochastic_depth=stochastic_depth,
        )
        self.alpha = (2 * num_layers) ** 0.25 if alpha is None else alpha

    def forward(self, x_BTD: Tensor, sublayers: Sequence[Sublayer]) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        for number, sublayer in enumerate(sublayers):
            y_BTD = self.branch(number, sublayer, x_BTD)
            x_BTD = self.norm(number).add(y_BTD, self.alpha * x_BTD, p=self.dropout, style="post")
        return x_BTD

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, alpha={self.alpha:.3g}"
