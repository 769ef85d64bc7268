"""mlp -- y = down(dropout(activation(up(x)))): the feedforward of a transformer, in plain layers.

x, y     [..., D]   D model
hidden   [..., F]   F = width, or int(expansion * D)
"""

from torch import Tensor, nn

from ...ops import dropout
from ..checks import check_last_dim
from ..ranges import Positive, Probability, Size, in_range
from ..registry import register
from .hidden import activated, custom_activation, hidden_width

__all__ = ["MLP"]


@register("feedforward", "mlp")
class MLP(nn.Module):
    """Two linear layers with an activation and dropout between them (Vaswani et al. 2017, section 3.3).

    Args:
        hidden_dim: D, the width of the model.
        expansion: the hidden width as a multiple of D.
        width: F, the hidden width itself, in place of an expansion; None takes int(expansion * D).
        activation: the name of any registered activation, or None for the identity.
        bias: whether both linear layers have a bias.
        dropout: probability of dropping a hidden value in training, 0 <= dropout < 1.

    Raises:
        ValueError: a width below one, an unknown activation, or a dropout outside [0, 1).

    >>> MLP(8, expansion=2.0, activation="relu")
    MLP(
      activation='relu', dropout=0.0
      (up): Linear(in_features=8, out_features=16, bias=True)
      (down): Linear(in_features=16, out_features=8, bias=True)
    )
    """

    @in_range
    def __init__(
        self,
        hidden_dim: Size,
        *,
        expansion: Positive = 4.0,
        width: Size | None = None,
        activation: str | None = "gelu",
        bias: bool = True,
        dropout: Probability = 0.0,
    ) -> None:
        super().__init__()
        width = hidden_width(hidden_dim, expansion=expansion, width=width)
        self.activation = activation
        self.dropout = dropout
        self.hidden_dim = hidden_dim
        self.custom_activation = custom_activation(activation)
        self.up = nn.Linear(hidden_dim, width, bias=bias)
        self.down = nn.Linear(width, hidden_dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        check_last_dim(x, self.hidden_dim)
        hidden = activated(self.up(x), self.activation, self.custom_activation)
        y: Tensor = self.down(dropout(hidden, self.dropout, training=self.training))
        return y

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}, dropout={self.dropout}"
