"""residual_rms_norm -- s = x + residual; y = rms_norm(s): the norm of a pre-norm block, and its residual stream.

    x, residual, y, s   [..., N]   any float dtype
    weight              [N]

See `normalise.formula` for gradients, dtypes, saved tensors and bytes moved, with s as a second output.
"""

from torch import Tensor

from .normalise import norm_reference, normalise
from .shapes import check_floating, check_like, check_row_vector, check_rows

__all__ = ["residual_rms_norm", "residual_rms_norm_reference"]


def residual_rms_norm(
    x: Tensor, residual: Tensor, *, weight: Tensor, eps: float = 1e-6, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(x + residual), x + residual).

    Args:
        x: [..., N], the sublayer's output, any float dtype.
        residual: [..., N], the residual stream.
        weight: [N], the norm's scale.
        eps: added to the mean square.
        backend: see `fuselayers.ops.implementations.dispatch`.

    Raises:
        ValueError: x has no dimension, residual or weight does not fit it, eps is negative or not finite, or the
            backend is unknown.
        TypeError: a tensor is not dense and floating, or eps is not a number.
        RuntimeError: the requested backend cannot take the call.

    >>> import torch
    >>> y, s = residual_rms_norm(torch.tensor([1.0, 1.0]), torch.tensor([2.0, -4.0]), weight=torch.ones(2))
    >>> s, y.round(decimals=3)
    (tensor([ 3., -3.]), tensor([ 1., -1.]))
    """
    check_rows("x", x)
    check_like("residual", residual, x)
    check_floating("weight", weight)
    check_row_vector("weight", weight, x)
    return normalise(x, residual, weight=weight, eps=eps, rms=True, backend=backend)


def residual_rms_norm_reference(
    x: Tensor, residual: Tensor, *, weight: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """The definition of the op, in plain torch."""
    total = x + residual
    return norm_reference(total, weight, None, eps=eps, rms=True), total
