"""residual_layer_norm -- s = x + residual; y = layer_norm(s): a pre-norm block's norm, and the stream that goes on.

    x, residual, y, s   [..., N]   any float dtype
    weight, bias        [N]        bias optional

    forward    s = x + residual
               y = (s - mean(s)) / sqrt(var(s) + eps) * weight + bias      mean and variance over N, in float32
    backward   of layer norm, plus ds; dx = dresidual = the sum

Saved for backward: s and its statistics, two float32 per row. Floor: two reads and two writes forward.

Layer norm: Ba, Kiros, Hinton 2016.
"""

import torch.nn.functional as F
from torch import Tensor

from .shapes import check_like, check_row_vector

__all__ = ["residual_layer_norm", "residual_layer_norm_reference"]


def residual_layer_norm(
    x: Tensor, residual: Tensor, *, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """Return (layer_norm(x + residual), x + residual).

    Args:
        x: [..., N], the sublayer's output, any float dtype.
        residual: [..., N], the stream it joins.
        weight: [N], the norm's scale.
        bias: [N], the norm's shift, or None for none.
        eps: added to the variance.

    Raises:
        ValueError: residual, weight or bias does not fit x.

    >>> import torch
    >>> y, s = residual_layer_norm(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 1.0]), weight=torch.ones(2))
    >>> s, y.round(decimals=3)
    (tensor([1., 3.]), tensor([-1.,  1.]))
    """
    check_like("residual", residual, x)
    check_row_vector("weight", weight, x)
    check_row_vector("bias", bias, x)
    total = x + residual
    return F.layer_norm(total, total.shape[-1:], weight, bias, eps), total


def residual_layer_norm_reference(
    x: Tensor, residual: Tensor, *, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """What the op means, written out."""
    total = x + residual
    centred = total - total.mean(-1, keepdim=True)
    y = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weight
    return (y if bias is None else y + bias), total
