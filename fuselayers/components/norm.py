"""Norms over the last dimension, which also join a sublayer's output to the residual stream.

x, residual, y, s   [..., N]
weight, bias        [N]

layer_norm   y = (x - mean) / sqrt(var + eps) * weight + bias      Ba, Kiros, Hinton 2016
rms_norm     y = x / sqrt(mean(x^2) + eps) * weight                Zhang, Sennrich 2019; with unit_offset, as in
             Gemma, weight holds the difference from one: y = ... * (1 + weight)
dyt          y = weight * tanh(alpha * x) + bias, alpha [1]        Zhu, Chen, He, LeCun, Liu, "Transformers without
             normalization", 2025, section 4
skip         y = x
"""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .._torch.modules import is_plain
from ..ops import (
    NormStyle,
    Shard,
    bias_dropout_residual,
    bias_dropout_residual_layer_norm,
    bias_dropout_residual_rms_norm,
    check_style,
    dropout,
    layer_norm,
    rms_norm,
)
from ..ops.shapes import check_like, check_row_vector, check_rows
from .checks import check_last_dim
from .option import NotNegative, Positive, Size, checked
from .registry import register


class Norm(nn.Module):
    """The base of the norms: a subclass defines `forward`, and may define `_fused_op`.

    The styles are those of `ops.bias_dropout_residual_layer_norm`; with d = dropout(x + bias, p) and s = d + residual:
    "post" is norm(s), "pre" is norm(d) + residual, "prenorm" is the pair (norm(s), s).
    """

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill a `weight` with ones and a `bias` with zeros.

        `initialise` calls it; a norm with other initial values overrides it.
        """
        for name, value in (("weight", 1.0), ("bias", 0.0)):
            parameter = getattr(self, name, None)
            if parameter is not None:
                parameter.fill_(value)

    def add(
        self,
        x: Tensor,
        residual: Tensor,
        *,
        bias: Tensor | None = None,
        p: float = 0.0,
        style: NormStyle = "prenorm",
        shard: Shard | None = None,
    ) -> Any:
        """Return dropout(x + bias, p), joined to `residual` and normalised as `style` says.

        Args:
            x: [..., N], a sublayer's output.
            residual: [..., N], the stream it joins.
            bias: [N], added to x, or None for none.
            p: dropout probability, 0 <= p <= 1; nothing is dropped in eval mode.
            style: "prenorm" returns (norm(s), s), "post" and "pre" one tensor.
            shard: the position of x in a larger tensor, whose dropout mask it uses; None if x is the whole tensor.

        Raises:
            ValueError: a shape does not fit x, the style is unknown, or p is outside [0, 1].
            TypeError: x, residual or bias is not a floating-point tensor.
        """
        op = self._fused_op() if is_plain(self) else None
        if op is not None:
            return op(x, residual, bias=bias, p=p, style=style, training=self.training, shard=shard)
        check_style(style)
        # A plain sum would broadcast. The fused ops check these themselves.
        check_rows("x", x)
        check_like("residual", residual, x)
        check_row_vector("bias", bias, x)
        return join(self, x, residual, bias, p=p, style=style, training=self.training, shard=shard)

    def _fused_op(self) -> Callable[..., Tensor | tuple[Tensor, Tensor]] | None:
        """Return the op that joins and normalises with this norm's weights; None to call `forward` on the sum."""
        return None


def join(
    norm: Callable[[Tensor], Tensor],
    x: Tensor,
    residual: Tensor,
    bias: Tensor | None,
    *,
    p: float,
    style: NormStyle,
    training: bool,
    shard: Shard | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `Norm.add` by calling the norm. Used by `Norm`, and by a fused layer whose norm is modified.

    >>> join(torch.neg, torch.ones(2), torch.ones(2), None, p=0.0, style="pre", training=True)
    tensor([0., 0.])
    """
    if style == "pre":
        return norm(dropout(x if bias is None else x + bias, p, training=training, shard=shard)) + residual
    total = bias_dropout_residual(x, residual, bias=bias, p=p, training=training, shard=shard)
    normed = norm(total)
    return (normed, total) if style == "prenorm" else normed


@register("norm", "layer_norm")
class LayerNorm(Norm):
    """Layer normalisation, with torch's names for its parameters; `add` is one fused op.

    Args:
        hidden_dim: N, the size of the last dimension.
        eps: added to the variance.
        bias: whether there is a shift besides the scale.

    Raises:
        ValueError: hidden_dim is below one, eps is negative, or (in forward) x is not [..., N].

    >>> norm = LayerNorm(2)
    >>> normed, total = norm.add(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 1.0]))
    >>> total
    tensor([1., 3.])
    """

    @checked
    def __init__(self, hidden_dim: Size, *, eps: NotNegative = 1e-5, bias: bool = True) -> None:
        super().__init__()
        self.hidden_dim = hidden_dim
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_dim))
        self.bias = nn.Parameter(torch.empty(hidden_dim)) if bias else None
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """[..., N] -> [..., N]."""
        check_last_dim(x, self.hidden_dim)
        return layer_norm(x, weight=self.weight, bias=self.bias, eps=self.eps)

    def _fused_op(self) -> Callable[..., Tensor | tuple[Tensor, Tensor]]:
        return partial(bias_dropout_residual_layer_norm, weight=self.weight, norm_bias=self.bias, eps=self.eps)

    def extra_repr(self) -> str:
        return f"{self.hidden_dim}, eps={self.eps}, bias={self.bias is not None}"


@register("norm", "rms_norm")
class RMSNorm(Norm):
    """Root mean square normalisation: a scale, no mean and no shift; `add` is one fused op.

    Args:
        hidden_dim: N, the size of the last dimension.
        eps: added to the mean square.
        unit_offset: whether the weight is the scale minus one. It then starts at zero, and weight decay pulls the scale
            towards one.

    Raises:
        ValueError: hidden_dim is below one, eps is negative, or (in forward) x is not [..., N].

    >>> RMSNorm(2)(torch.tensor([3.0, -3.0])).detach().round(decimals=3)
    tensor([ 1., -1.])
    """

    @checked
    def __init__(self, hidden_dim: Size, *, eps: NotNegative = 1e-6, unit_offset: bool = False) -> None:
        super().__init__()
        self.hidden_dim = hidden_dim
        self.eps = eps
        self.unit_offset = unit_offset
        self.weight = nn.Parameter(torch.empty(hidden_dim))
        self.reset_parameters()

    @property
    def weights_mean(self) -> str | None:
        """The meaning of the weight if it is not the scale, for `carry_weights`."""
        return "scale less one" if self.unit_offset else None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the scale to one."""
        self.weight.fill_(0.0 if self.unit_offset else 1.0)

    def forward(self, x: Tensor) -> Tensor:
        """[..., N] -> [..., N]."""
        check_last_dim(x, self.hidden_dim)
        return rms_norm(x, weight=self._scale(), eps=self.eps)

    def _fused_op(self) -> Callable[..., Tensor | tuple[Tensor, Tensor]]:
        return partial(bias_dropout_residual_rms_norm, weight=self._scale(), eps=self.eps)

    def _scale(self) -> Tensor:
        if not self.unit_offset:
            return self.weight
        # In float32 or wider: in bfloat16 the sum has only seven fractional bits.
        return self.weight.to(torch.promote_types(self.weight.dtype, torch.float32)) + 1

    def extra_repr(self) -> str:
        return f"{self.hidden_dim}, eps={self.eps}, unit_offset={self.unit_offset}"


@register("norm", "dyt")
class DynamicTanh(Norm):
    """A scaled tanh that bounds outliers as norms do, without statistics of x.

    Args:
        hidden_dim: N, the size of the last dimension.
        alpha: initial value of the learned steepness; section 7 of the paper has other values for large language
            models.
        bias: whether there is a shift besides the scale.

    Raises:
        ValueError: hidden_dim is below one, alpha is not positive and finite, or (in forward) x is not [..., N].

    >>> DynamicTanh(3)(torch.tensor([-1e9, 0.0, 2.0])).detach()
    tensor([-1.0000,  0.0000,  0.7616])
    """

    # Its weight is not the scale of a normalised x; see `carry_weights`.
    weights_mean: ClassVar[str] = "scale of a tanh"

    @checked
    def __init__(self, hidden_dim: Size, *, alpha: Positive = 0.5, bias: bool = True) -> None:
        super().__init__()
        self.hidden_dim = hidden_dim
        self.initial_alpha = alpha
        self.alpha = nn.Parameter(torch.empty(1))
        self.weight = nn.Parameter(torch.empty(hidden_dim))
        self.bias = nn.Parameter(torch.empty(hidden_dim)) if bias else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set alpha to its initial value, the weight to ones, the bias to zeros."""
        super().reset_parameters()
        self.alpha.fill_(self.initial_alpha)

    def forward(self, x: Tensor) -> Tensor:
        """[..., N] -> [..., N] in x's dtype."""
        check_last_dim(x, self.hidden_dim)
        y = self.weight * (self.alpha * x).tanh()
        return (y if self.bias is None else y + self.bias).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.hidden_dim}, alpha={self.initial_alpha}, bias={self.bias is not None}"


@register("norm", "skip")
class SkipNorm(Norm):
    """Returns x unchanged; `add` is only the sum.

    Args:
        hidden_dim: N, the size of the last dimension.

    Raises:
        ValueError: hidden_dim is below one, or (in forward) x is not [..., N].

    >>> SkipNorm(2)(torch.tensor([3.0, -3.0]))
    tensor([ 3., -3.])
    """

    @checked
    def __init__(self, hidden_dim: Size) -> None:
        super().__init__()
        self.hidden_dim = hidden_dim

    def forward(self, x: Tensor) -> Tensor:
        """[..., N] -> [..., N]."""
        check_last_dim(x, self.hidden_dim)
        return x

    def extra_repr(self) -> str:
        return f"{self.hidden_dim}"
