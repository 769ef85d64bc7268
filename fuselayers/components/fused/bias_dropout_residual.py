"""bias_dropout_residual -- y = dropout(x + bias, p) + residual, as a layer with its own bias.

x, residual, y   [..., N]
bias             [N]
"""

from torch import Tensor

from ...ops import bias_dropout_residual
from ..ranges import Probability, Size, in_range
from ..registry import register
from .biased_op import BiasedOp

__all__ = ["FusedBiasDropoutResidual"]


@register("fused", "bias_dropout_residual")
class FusedBiasDropoutResidual(BiasedOp):
    """Bias, dropout and the residual sum in one op.

    The bias is converted to x's dtype, so that the result has that of x + residual.

    Args:
        p: dropout probability, 0 <= p < 1.
        bias_shape: N, the size of the bias, a parameter that starts at zero; None for no bias.
        backend: None calls the op directly; a name sends it through `fuselayers.fuse` for that backend.
        partition: how `fuse` chooses what is saved for backward; without a backend it has no effect.

    Raises:
        ValueError: p is outside [0, 1), bias_shape is below one, or there is no such backend or partition.

    >>> import torch
    >>> layer = FusedBiasDropoutResidual(0.1, 2, backend="eager")
    >>> layer.eval()(torch.tensor([1.0, 2.0]), torch.tensor([10.0, 10.0])).tolist()
    [11.0, 12.0]
    """

    @in_range
    def __init__(
        self,
        p: Probability,
        bias_shape: Size | None = None,
        *,
        backend: str | None = "auto",
        partition: str = "min_cut",
    ) -> None:
        super().__init__(bias_dropout_residual, p=p, bias_shape=bias_shape, backend=backend, partition=partition)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """[..., N], [..., N] -> [..., N]."""
        y: Tensor = self._call(x, residual, bias=self._bias_like(x))
        return y
