"""bias_activation_dropout -- y = dropout(activation(x + bias), p), as a layer with its own bias.

x, y   [..., N]
bias   [N]
"""

from torch import Tensor

from ...ops import bias_activation_dropout, check_activation
from ..ranges import Probability, Size, in_range
from ..registry import register
from .biased_op import BiasedOp

__all__ = ["FusedBiasActivationDropout"]


@register("fused", "bias_activation_dropout")
class FusedBiasActivationDropout(BiasedOp):
    """Bias, activation and dropout in one op.

    The result has x's dtype: the bias is converted to it.

    Args:
        p: dropout probability, 0 <= p < 1.
        bias_shape: N, the size of the bias, a parameter that starts at zero; None for no bias.
        activation: a name in `ops.ACTIVATIONS`, or None for the identity.
        backend: None calls the op directly; a name sends it through `fuselayers.fuse` for that backend.
        partition: how `fuse` chooses what is saved for backward; without a backend it has no effect.

    Raises:
        ValueError: p is outside [0, 1), bias_shape is below one, or there is no such activation, backend or partition.

    >>> import torch
    >>> layer = FusedBiasActivationDropout(0.1, 4, activation="relu", backend="eager")
    >>> layer.eval()(torch.tensor([-1.0, 0.0, 1.0, 2.0])).tolist()
    [0.0, 0.0, 1.0, 2.0]
    """

    @in_range
    def __init__(
        self,
        p: Probability,
        bias_shape: Size | None = None,
        *,
        activation: str | None = None,
        backend: str | None = "auto",
        partition: str = "min_cut",
    ) -> None:
        check_activation(activation)
        super().__init__(bias_activation_dropout, p=p, bias_shape=bias_shape, backend=backend, partition=partition)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """[..., N] -> [..., N]."""
        y: Tensor = self._call(x, bias=self._bias_like(x), activation=self.activation)
        return y

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}, {super().extra_repr()}"
