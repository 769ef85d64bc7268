"""fused_mlp -- the mlp with its bias, activation and dropout in one op between the two matmuls.

    x, y     [..., D]   D model
    hidden   [..., F]   F = width, or int(expansion * D)

It has the parameters, the state_dict keys and the numbers of `MLP`; only the values saved for backward differ.
"""

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from ...ops import bias_activation_dropout
from ..checks import check_last_dim
from ..fused_op import op_for
from ..hooks import is_plain_linear
from ..ranges import Positive, Probability, Size, in_range
from ..registry import register
from .mlp import MLP

__all__ = ["FusedMLP"]


@register("feedforward", "fused_mlp")
class FusedMLP(MLP):
    """The MLP whose bias, activation and dropout are one op.

    With a registered activation that is not in `ops.ACTIVATIONS`, or if `up` is not an unmodified `nn.Linear`, the
    layer runs as `MLP`.

    Args:
        backend: None calls the op directly; a name sends it through `fuselayers.fuse` for that backend.
        partition: how `fuse` chooses what is saved for backward; without a backend it has no effect.

    Raises:
        ValueError: as `MLP`, or there is no such backend or partition.

    >>> plain, fused = MLP(8), FusedMLP(8)
    >>> fused.load_state_dict(plain.state_dict())
    <All keys matched successfully>
    """

    built_in: ClassVar[frozenset[str]] = frozenset({"backend", "partition"})

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
        backend: str | None = None,
        partition: str = "min_cut",
    ) -> None:
        super().__init__(
            hidden_dim, expansion=expansion, width=width, activation=activation, bias=bias, dropout=dropout
        )
        self.backend = backend
        self.partition = partition
        op_for(bias_activation_dropout, backend=backend, partition=partition)  # a misspelt name fails here, not later

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        check_last_dim(x, self.hidden_dim)
        if self.custom_activation is not None or not is_plain_linear(self.up):
            return super().forward(x)
        hidden = F.linear(x, self.up.weight)
        # Under autocast the matmul gives bfloat16 and the bias is float32; their sum would be float32, twice the bytes.
        bias = self.up.bias.to(hidden.dtype) if self.up.bias is not None else None
        op = op_for(bias_activation_dropout, backend=self.backend, partition=self.partition)
        hidden = op(hidden, bias, activation=self.activation, p=self.dropout, training=self.training)
        y: Tensor = self.down(hidden)
        return y
