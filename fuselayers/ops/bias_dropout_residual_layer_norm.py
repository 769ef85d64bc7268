"""bias_dropout_residual_layer_norm -- a sublayer's output, dropped, added to the residual stream and normalised.

    x, residual, y, s         [..., N]   any float dtype
    weight, norm_bias, bias   [N]        both biases optional
    seed                      []         int64

With d = dropout(x + bias, p) and s = d + residual, `style` says which of the three known arrangements is meant:

    "post"      y = norm(s)                 a post-norm block (Vaswani et al. 2017)
    "pre"       y = norm(d) + residual      normalises the sublayer's output before it joins (xFormers' meaning of pre)
    "prenorm"   (norm(s), s)                what a pre-norm block needs: the next sublayer's input, and the stream

Dtypes promote as in torch's own sums; the norm's result has the dtype of what is normalised (see residual_layer_norm).

Saved for backward: s (or d for "pre"), its statistics, two numbers per row, and a seed (see dropout). Floor: two reads
and one write forward ("prenorm": two writes).
"""

from typing import Literal, get_args, overload

from torch import Tensor

from ..names import no_such
from .bias_dropout_residual import bias_dropout_residual, bias_dropout_residual_reference
from .dropout import dropout, dropout_reference
from .philox import check_probability, check_seed
from .residual_layer_norm import layer_norm, layer_norm_reference
from .shapes import check_floating, check_like, check_row_vector, check_rows

__all__ = ["NormStyle", "bias_dropout_residual_layer_norm", "bias_dropout_residual_layer_norm_reference", "check_style"]

NormStyle = Literal["post", "pre", "prenorm"]


def check_style(style: str) -> None:
    """Raise unless `style` is one of NormStyle: TypeError for what is no name, ValueError for others."""
    if not isinstance(style, str):
        raise TypeError(f"norm style must be a name, got a {type(style).__name__}")
    if style not in get_args(NormStyle):
        raise ValueError(no_such("norm style", style, get_args(NormStyle)))


@overload
def bias_dropout_residual_layer_norm(
    x: Tensor,
    residual: Tensor,
    *,
    weight: Tensor,
    norm_bias: Tensor | None = None,
    bias: Tensor | None = None,
    p: float = 0.0,
    eps: float = 1e-5,
    style: Literal["post", "pre"] = "post",
    training: bool = True,
    seed: Tensor | None = None,
) -> Tensor: ...
@overload
def bias_dropout_residual_layer_norm(
    x: Tensor,
    residual: Tensor,
    *,
    weight: Tensor,
    norm_bias: Tensor | None = None,
    bias: Tensor | None = None,
    p: float = 0.0,
    eps: float = 1e-5,
    style: Literal["prenorm"],
    training: bool = True,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def bias_dropout_residual_layer_norm(
    x: Tensor,
    residual: Tensor,
    *,
    weight: Tensor,
    norm_bias: Tensor | None = None,
    bias: Tensor | None = None,
    p: float = 0.0,
    eps: float = 1e-5,
    style: NormStyle,
    training: bool = True,
    seed: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...
def bias_dropout_residual_layer_norm(
    x: Tensor,
    residual: Tensor,
    *,
    weight: Tensor,
    norm_bias: Tensor | None = None,
    bias: Tensor | None = None,
    p: float = 0.0,
    eps: float = 1e-5,
    style: NormStyle = "post",
    training: bool = True,
    seed: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return norm(dropout(x + bias, p) + residual), arranged as `style` says.

    Args:
        x: [..., N], the sublayer's output, any float dtype.
        residual: [..., N], the stream it joins.
        weight: [N], the norm's scale.
        norm_bias: [N], the norm's shift, or None for none.
        bias: [N], added to x, or None for none.
        p: dropout probability, 0 <= p < 1.
        eps: added to the variance.
        style: "post", "pre" or "prenorm", see the top of this file; "prenorm" returns two tensors.
        training: False leaves the dropout out.
        seed: int64 tensor of shape [] on x's device, which fixes the mask; drawn from torch's generator when None.

    Raises:
        ValueError: x has no dimension, an argument does not fit it, the style is unknown, or p is outside [0, 1).
        TypeError: a tensor is not floating, the seed is not a tensor, p is one, or the style is no name.
        RuntimeError: without a seed, inside a `torch.vmap` whose `randomness` is "error", which is its default.

    >>> import torch
    >>> x, residual = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 1.0])
    >>> bias_dropout_residual_layer_norm(x, residual, weight=torch.ones(2)).round(decimals=3)
    tensor([-1.,  1.])
    """
    check_rows("x", x)
    check_like("residual", residual, x)
    check_floating("weight", weight)
    for name, vector in (("weight", weight), ("norm_bias", norm_bias), ("bias", bias)):
        check_row_vector(name, vector, x)
    check_style(style)
    check_probability(p)
    check_seed(seed, x.device)
    if style == "pre":
        dropped = dropout(x if bias is None else x + bias, p, training=training, seed=seed)
        return layer_norm(dropped, weight, norm_bias, eps=eps) + residual
    total = bias_dropout_residual(x, residual, bias=bias, p=p, training=training, seed=seed)
    normed = layer_norm(total, weight, norm_bias, eps=eps)
    return (normed, total) if style == "prenorm" else normed


def bias_dropout_residual_layer_norm_reference(
    x: Tensor,
    residual: Tensor,
    *,
    weight: Tensor,
    norm_bias: Tensor | None = None,
    bias: Tensor | None = None,
    p: float = 0.0,
    eps: float = 1e-5,
    style: NormStyle = "post",
    seed: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """What the op means in training, in plain torch; without a seed nothing is dropped."""
    if style == "pre":
        z = x if bias is None else x + bias
        dropped = z if seed is None else dropout_reference(z, p, seed=seed)
        return layer_norm_reference(dropped, weight, norm_bias, eps=eps) + residual
    total = bias_dropout_residual_reference(x, residual, bias=bias, p=p, seed=seed)
    normed = layer_norm_reference(total, weight, norm_bias, eps=eps)
    return (normed, total) if style == "prenorm" else normed
