"""mlp -- y = down(dropout(activation(up(x)))): the feedforward of a transformer, in plain layers.

x, y     [..., D]   D model
hidden   [..., F]   F = width, or int(expansion * D)

fused_mlp computes bias, activation and dropout in one op between the two matmuls. It has the same parameters,
state_dict keys and results as mlp; only the values saved for backward differ.
"""

from collections.abc import Callable
from typing import ClassVar

from torch import Tensor, nn

from ...ops import bias_activation_dropout, dropout, linear
from ..checks import check_last_dim
from ..fused_op import check_names, op_for
from ..layout import WHOLE, Layout
from ..linear import Linear
from ..option import Positive, Probability, Size, checked
from ..plain import is_plain_linear
from ..registry import register
from .hidden import activated, custom_activation, hidden_width


@register("feedforward", "mlp")
class MLP(nn.Module):
    """Two linear layers, an activation and dropout between them (Vaswani et al. 2017, section 3.3).

    Args:
        hidden_dim: D, the width of the model.
        expansion: the hidden width as a multiple of D.
        width: F, the hidden width, in place of an expansion; None takes int(expansion * D).
        activation: the name of any registered activation, or None for the identity.
        bias: whether both linear layers have a bias.
        dropout: probability of dropping a hidden value in training, 0 <= dropout <= 1.

    Raises:
        ValueError: a width below one, an unknown activation, or a dropout outside [0, 1].

    >>> MLP(8, expansion=2.0, activation="relu")
    MLP(
      activation='relu', dropout=0.0
      (up): Linear(in_features=8, out_features=16, bias=True)
      (down): Linear(in_features=16, out_features=8, bias=True)
    )
    """

    layout: Layout = WHOLE

    @checked
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
        self.up = Linear(hidden_dim, width, bias=bias)
        self.down = Linear(width, hidden_dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        check_last_dim(x, self.hidden_dim)
        return self.through(x, self.up, self.down)

    @property
    def linears(self) -> tuple[str, ...]:
        """The names of the layers that `through` takes."""
        return "up", "down"

    def through(self, x: Tensor, up: Callable[..., Tensor], down: Callable[..., Tensor]) -> Tensor:
        """Run forward with the given layers. A mixture of experts passes layers that combine those of all experts."""
        hidden = activated(up(x), self.activation, self.custom_activation)
        shard = self.layout.shard(hidden, -1)
        return down(dropout(hidden, self.dropout, training=self.training, shard=shard))

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}, dropout={self.dropout}"


@register("feedforward", "fused_mlp")
class FusedMLP(MLP):
    """The MLP whose bias, activation and dropout are one op.

    With a registered activation that is not in `ops.ACTIVATIONS` the layer runs as `MLP`. If `up` is not an unmodified
    `nn.Linear`, it is called and adds its bias itself.

    Args:
        backend: "auto" calls the op, which chooses its kernel; the name of a backend runs the op through
            `fuselayers.fuse`.
        partition: how `fuse` chooses the values saved for backward; the backend "auto" does not use it.

    Raises:
        ValueError: as `MLP`, or there is no such backend or partition.
        TypeError: the backend is not a name, such as None.

    >>> plain, fused = MLP(8), FusedMLP(8)
    >>> fused.load_state_dict(plain.state_dict())
    <All keys matched successfully>
    """

    built_in: ClassVar[frozenset[str]] = frozenset({"backend", "partition"})

    @checked
    def __init__(
        self,
        hidden_dim: Size,
        *,
        expansion: Positive = 4.0,
        width: Size | None = None,
        activation: str | None = "gelu",
        bias: bool = True,
        dropout: Probability = 0.0,
        backend: str = "auto",
        partition: str = "min_cut",
    ) -> None:
        super().__init__(
            hidden_dim, expansion=expansion, width=width, activation=activation, bias=bias, dropout=dropout
        )
        check_names(backend, partition)
        self.backend = backend
        self.partition = partition

    def through(self, x: Tensor, up: Callable[..., Tensor], down: Callable[..., Tensor]) -> Tensor:
        """As `MLP.through`."""
        if self.custom_activation is not None:
            return super().through(x, up, down)
        bias = None
        if isinstance(up, nn.Linear) and is_plain_linear(up):
            hidden = linear(x, up.weight)
            # Under autocast the product is bfloat16; with a float32 bias the sum would be float32, twice the bytes.
            bias = up.bias.to(hidden.dtype) if up.bias is not None else None
        else:
            hidden = up(x)
        op = op_for(bias_activation_dropout, backend=self.backend, partition=self.partition)
        shard = self.layout.shard(hidden, -1)
        return down(op(hidden, bias, activation=self.activation, p=self.dropout, training=self.training, shard=shard))
