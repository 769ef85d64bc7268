"""residual_layer_norm -- s = x + residual; y = layer_norm(s): a pre-norm block's norm, and the stream that goes on.

    x, residual, y, s   [..., N]   any float dtype
    weight, bias        [N]        bias optional

    forward    s = x + residual
               y = (s - mean(s)) / sqrt(var(s) + eps) * weight + bias      mean and variance over N
    backward   of layer norm, plus ds; dx = dresidual = the sum

Dtypes: s has the dtype to which torch promotes x and residual, and so has y, under autocast too. Weight and bias are
rounded to it, whatever their own. What lies between is computed in float32 at least (float64 where s is float64).

Saved for backward: s and its statistics, two numbers per row. Floor: two reads and two writes forward.

Layer norm: Ba, Kiros, Hinton 2016.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .shapes import check_floating, check_like, check_row_vector, check_rows

__all__ = ["layer_norm", "layer_norm_reference", "residual_layer_norm", "residual_layer_norm_reference"]


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
        ValueError: x has no dimension, or residual, weight or bias does not fit it.
        TypeError: a tensor is not floating.

    >>> y, s = residual_layer_norm(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 1.0]), weight=torch.ones(2))
    >>> s, y.round(decimals=3)
    (tensor([1., 3.]), tensor([-1.,  1.]))
    """
    check_rows("x", x)
    check_like("residual", residual, x)
    check_floating("weight", weight)
    check_row_vector("weight", weight, x)
    check_row_vector("bias", bias, x)
    total = x + residual
    return layer_norm(total, weight, bias, eps=eps), total


def residual_layer_norm_reference(
    x: Tensor, residual: Tensor, *, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """What the op means, written out."""
    total = x + residual
    return layer_norm_reference(total, weight, bias, eps=eps), total


def layer_norm(s: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Return s normalised, in s's dtype. Used by this op and by bias_dropout_residual_layer_norm."""
    # torch's kernels disagree about parameters of another dtype: the CPU's takes float32 beside bfloat16 and not the
    # reverse, its decomposition takes both. With the cast before them there is nothing to disagree about.
    bias = None if bias is None else bias.to(s.dtype)
    # On a GPU autocast gives float32 back, which would be another dtype than the formula's.
    return F.layer_norm(s, s.shape[-1:], weight.to(s.dtype), bias, eps).to(s.dtype)


def layer_norm_reference(s: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Layer norm written out, in float32 at least; used by the references of the same two ops."""
    wide = torch.promote_types(s.dtype, torch.float32)
    centred = s.to(wide) - s.to(wide).mean(-1, keepdim=True)
    y = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weight.to(s.dtype)
    return (y if bias is None else y + bias.to(s.dtype)).to(s.dtype)
