"""gated_mlp -- y = down(dropout(activation(gate(x)) * up(x))): the feedforward of Llama with silu.

    x, y             [..., D]   D model
    gate, up, both   [..., F]   F = int(expansion * D), rounded up to a multiple

Shazeer, "GLU variants improve transformer", 2020.
"""

from typing import ClassVar

from torch import Tensor, nn

from ...ops import check_activation, dropout, gated_activation
from ..checks import check_last_dim
from ..fused_op import op_for
from ..ranges import Positive, Probability, Size, in_range
from ..registry import register

__all__ = ["GatedMLP"]


@register("feedforward", "gated_mlp")
class GatedMLP(nn.Module):
    """Three linear layers: one, activated, scales another; the third brings the product back.

    Args:
        hidden_dim: D, the width of the model.
        expansion: the hidden width as a multiple of D; 8/3 gives as many weights as an MLP of expansion 4.
        multiple_of: the hidden width is rounded up to a multiple of this number.
        activation: a name in `ops.ACTIVATIONS`, or None for the identity.
        bias: whether the three linear layers have a bias.
        dropout: probability of dropping a hidden value in training, 0 <= dropout < 1.
        backend: None calls the op directly; a name sends it through `fuselayers.fuse` for that backend.
        partition: how `fuse` chooses what is saved for backward; without a backend it has no effect.

    Raises:
        ValueError: a width below one, an unknown activation, a dropout outside [0, 1), or no such backend or partition.

    >>> GatedMLP(8, multiple_of=16).down.in_features
    32
    """

    built_in: ClassVar[frozenset[str]] = frozenset({"backend", "partition"})

    @in_range
    def __init__(
        self,
        hidden_dim: Size,
        *,
        expansion: Positive = 8 / 3,
        multiple_of: Size = 1,
        activation: str | None = "silu",
        bias: bool = False,
        dropout: Probability = 0.0,
        backend: str | None = None,
        partition: str = "min_cut",
    ) -> None:
        super().__init__()
        check_activation(activation)
        width = -(-int(expansion * hidden_dim) // multiple_of) * multiple_of
        if width < 1:
            raise ValueError(
                f"expansion must give at least one hidden value, got {expansion} for hidden_dim {hidden_dim}"
            )
        self.activation = activation
        self.dropout = dropout
        self.hidden_dim = hidden_dim
        self.backend = backend
        self.partition = partition
        op_for(_gated_activation_dropout, backend=backend, partition=partition)  # a misspelt name fails here, not later
        self.gate = nn.Linear(hidden_dim, width, bias=bias)
        self.up = nn.Linear(hidden_dim, width, bias=bias)
        self.down = nn.Linear(width, hidden_dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        check_last_dim(x, self.hidden_dim)
        op = op_for(_gated_activation_dropout, backend=self.backend, partition=self.partition)
        hidden = op(self.gate(x), self.up(x), activation=self.activation, p=self.dropout, training=self.training)
        y: Tensor = self.down(hidden)
        return y

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}, dropout={self.dropout}"


def _gated_activation_dropout(gate: Tensor, up: Tensor, *, activation: str | None, p: float, training: bool) -> Tensor:
    return dropout(gated_activation(gate, up, activation=activation), p, training=training)
