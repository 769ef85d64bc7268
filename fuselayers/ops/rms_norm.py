"""rms_norm -- y = x / sqrt(mean(x^2) + eps) * weight, the mean over the last dimension.

    x, y     [..., N]   any float dtype
    weight   [N]

See `normalise.formula` for gradients, dtypes, saved tensors and bytes moved, with s = x.

Zhang, Sennrich, "Root mean square layer normalization", 2019.
"""

from torch import Tensor

from .normalise import norm_reference, normalise
from .shapes import check_floating, check_row_vector, check_rows

__all__ = ["rms_norm", "rms_norm_reference"]


def rms_norm(x: Tensor, *, weight: Tensor, eps: float = 1e-6, backend: str = "auto") -> Tensor:
    """Return x divided by its root mean square over the last dimension, scaled; in x's dtype.

    Args:
        x: [..., N], any float dtype.
        weight: [N], the scale.
        eps: added to the mean square.
        backend: see `fuselayers.ops.implementations.dispatch`.

    Raises:
        ValueError: x has no dimension, weight does not fit it, eps is negative or not finite, or the backend is
            unknown.
        TypeError: a tensor is not dense and floating, or eps is not a number.
        RuntimeError: the requested backend cannot take the call.

    >>> import torch
    >>> rms_norm(torch.tensor([3.0, -3.0]), weight=torch.ones(2)).round(decimals=3)
    tensor([ 1., -1.])
    """
    check_rows("x", x)
    check_floating("weight", weight)
    check_row_vector("weight", weight, x)
    return normalise(x, weight=weight, eps=eps, rms=True, backend=backend)[0]


def rms_norm_reference(x: Tensor, *, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """The definition of the op, in plain torch."""
    return norm_reference(x, weight, None, eps=eps, rms=True)
