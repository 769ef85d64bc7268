"""residual_layer_norm -- s = x + residual; y = layer_norm(s): the norm of a pre-norm block, and its residual stream.

    x, residual, y, s   [..., N]   any float dtype
    weight, bias        [N]        bias optional

See `normalise.formula` for gradients, dtypes, saved tensors and bytes moved, with s as a second output.

Layer norm: Ba, Kiros, Hinton 2016.
"""

from torch import Tensor

from .normalise import norm_reference, normalise
from .shapes import check_floating, check_like, check_row_vector, check_rows

__all__ = ["residual_layer_norm", "residual_layer_norm_reference"]


def residual_layer_norm(
    x: Tensor,
    residual: Tensor,
    *,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Return (layer_norm(x + residual), x + residual).

    Args:
        x: [..., N], the sublayer's output, any float dtype.
        residual: [..., N], the residual stream.
        weight: [N], the norm's scale.
        bias: [N], the norm's shift, or None for none.
        eps: added to the variance.
        backend: see `fuselayers.ops.implementations.dispatch`.

    Raises:
        ValueError: x has no dimension, residual, weight or bias does not fit it, eps is negative or not finite, or the
            backend is unknown.
        TypeError: a tensor is not dense and floating, or eps is not a number.
        RuntimeError: the requested backend cannot take the call.

    >>> import torch
    >>> y, s = residual_layer_norm(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 1.0]), weight=torch.ones(2))
    >>> s, y.round(decimals=3)
    (tensor([1., 3.]), tensor([-1.,  1.]))
    """
    check_rows("x", x)
    check_like("residual", residual, x)
    check_floating("weight", weight)
    check_row_vector("weight", weight, x)
    check_row_vector("bias", bias, x)
    return normalise(x, residual, weight=weight, norm_bias=bias, eps=eps, rms=False, backend=backend)


def residual_layer_norm_reference(
    x: Tensor, residual: Tensor, *, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """The definition of the op, in plain torch."""
    total = x + residual
    return norm_reference(total, weight, bias, eps=eps, rms=False), total
