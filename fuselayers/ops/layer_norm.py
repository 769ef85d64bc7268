"""layer_norm -- y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, mean and variance over the last dimension.

    x, y           [..., N]   any float dtype
    weight, bias   [N]        bias optional

See `normalise.formula` for gradients, dtypes, saved tensors and bytes moved, with s = x.

Ba, Kiros, Hinton 2016.
"""

from torch import Tensor

from .normalise import norm_reference, normalise
from .shapes import check_floating, check_row_vector, check_rows

__all__ = ["layer_norm", "layer_norm_reference"]


def layer_norm(
    x: Tensor, *, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5, backend: str = "auto"
) -> Tensor:
    """Return x normalised to mean 0 and variance 1 over its last dimension, scaled and shifted; in x's dtype.

    Args:
        x: [..., N], any float dtype.
        weight: [N], the scale.
        bias: [N], the shift, or None for none.
        eps: added to the variance.
        backend: see `fuselayers.ops.implementations.dispatch`.

    Raises:
        ValueError: x has no dimension, weight or bias does not fit it, eps is negative or not finite, or the backend is
            unknown.
        TypeError: a tensor is not dense and floating, or eps is not a number.
        RuntimeError: the requested backend cannot take the call.

    >>> import torch
    >>> layer_norm(torch.tensor([1.0, 3.0]), weight=torch.ones(2)).round(decimals=3)
    tensor([-1.,  1.])
    """
    check_rows("x", x)
    check_floating("weight", weight)
    check_row_vector("weight", weight, x)
    check_row_vector("bias", bias, x)
    return normalise(x, weight=weight, norm_bias=bias, eps=eps, rms=False, backend=backend)[0]


def layer_norm_reference(x: Tensor, *, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """The definition of the op, in plain torch."""
    return norm_reference(x, weight, bias, eps=eps, rms=False)
