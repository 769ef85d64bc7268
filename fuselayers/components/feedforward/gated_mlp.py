"""gated_mlp -- y = down(dropout(activation(gate(x)) * up(x))): the feedforward of Llama.

    x, y             [..., D]   D model
    gate, up, both   [..., F]   F = width, or int(expansion * D) rounded up to a multiple

SwiGLU with the activation silu, GEGLU with gelu, ReGLU with relu, GLU with sigmoid.

Shazeer, "GLU variants improve transformer", 2020.
"""

from collections.abc import Callable
from typing import ClassVar

from torch import Tensor, nn

from ...ops import Shard, dropout, gated_activation
from ..checks import check_last_dim
from ..fused_op import check_names, op_for
from ..layout import WHOLE, Layout
from ..linear import Linear
from ..option import Positive, Probability, Size, checked
from ..registry import register
from .hidden import custom_activation, hidden_width
from .packed import save_in_parts


@register("feedforward", "gated_mlp")
class GatedMLP(nn.Module):
    """Three linear layers: the activated gate multiplies `up`, and `down` projects the product back to D.

    Args:
        hidden_dim: D, the width of the model.
        expansion: the hidden width as a multiple of D; 8/3 gives as many weights as an MLP of expansion 4.
        width: F, the hidden width, in place of an expansion and its rounding; None uses those.
        multiple_of: the hidden width that the expansion gives is rounded up to a multiple of this number.
        activation: the name of any registered activation, or None for the identity. An activation that is not in
            `ops.ACTIVATIONS` runs as a separate module, unfused.
        packed: whether gate and up are one parameter and one matmul. A state_dict still holds two tensors, so weights
            fit both forms; the state of an optimizer does not. `torch.func.functional_call` needs
            `dict(module.named_parameters())` in place of the state_dict.
        bias: whether the three linear layers have a bias.
        dropout: probability of dropping a hidden value in training, 0 <= dropout <= 1.
        backend: "auto" calls the op, which chooses its kernel; the name of a backend runs the op through
            `fuselayers.fuse`.
        partition: how `fuse` chooses the values saved for backward; the backend "auto" does not use it.

    Raises:
        ValueError: a width below one, an unknown activation, a dropout outside [0, 1], or no such backend or partition.
        TypeError: the backend is not a name, such as None.

    >>> GatedMLP(8, multiple_of=16).down.in_features
    32
    """

    built_in: ClassVar[frozenset[str]] = frozenset({"backend", "partition"})
    layout: Layout = WHOLE

    @checked
    def __init__(
        self,
        hidden_dim: Size,
        *,
        expansion: Positive = 8 / 3,
        width: Size | None = None,
        multiple_of: Size = 1,
        activation: str | None = "silu",
        packed: bool = False,
        bias: bool = False,
        dropout: Probability = 0.0,
        backend: str = "auto",
        partition: str = "min_cut",
    ) -> None:
        super().__init__()
        width = hidden_width(hidden_dim, expansion=expansion, width=width, multiple_of=multiple_of)
        self.activation = activation
        self.packed = packed
        self.dropout = dropout
        self.hidden_dim = hidden_dim
        check_names(backend, partition)
        self.backend = backend
        self.partition = partition
        self.custom_activation = custom_activation(activation)
        if packed:
            self.gate_up = Linear(hidden_dim, 2 * width, bias=bias)
            save_in_parts(self)
        else:
            self.gate = Linear(hidden_dim, width, bias=bias)
            self.up = Linear(hidden_dim, width, bias=bias)
        self.down = Linear(width, hidden_dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        check_last_dim(x, self.hidden_dim)
        return self.through(x, *(getattr(self, name) for name in self.linears))

    @property
    def linears(self) -> tuple[str, ...]:
        """The names of the layers that `through` takes."""
        return ("gate_up", "down") if self.packed else ("gate", "up", "down")

    def through(self, x: Tensor, *layers: Callable[..., Tensor]) -> Tensor:
        """As `MLP.through`."""
        *first, down = layers
        gate, up = (first[0](x), None) if self.packed else (layer(x) for layer in first)
        if self.custom_activation is None:
            op = op_for(_gated_activation_dropout, backend=self.backend, partition=self.partition)
            shard = self.layout.shard(gate.chunk(2, dim=-1)[0] if up is None else up, -1)
            hidden = op(gate, up, activation=self.activation, p=self.dropout, training=self.training, shard=shard)
        else:
            if up is None:
                gate, up = gate.chunk(2, dim=-1)
            hidden = dropout(self.custom_activation(gate) * up, self.dropout, training=self.training)
        return down(hidden)

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}, packed={self.packed}, dropout={self.dropout}"


def _gated_activation_dropout(
    gate: Tensor, up: Tensor | None, *, activation: str | None, p: float, training: bool, shard: Shard | None
) -> Tensor:
    return dropout(gated_activation(gate, up, activation=activation), p, training=training, shard=shard)
