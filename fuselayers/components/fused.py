"""Layers that are a single fused op with a learned bias, in place of three or four layers.

x, residual, y   [..., N]
bias             [N]

bias_activation_dropout            y = dropout(activation(x + bias), p)
bias_dropout_residual              y = dropout(x + bias, p) + residual
bias_dropout_residual_layer_norm   y = norm(dropout(x + bias, p) + residual), the norm's weight and bias [N]
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .._torch.modules import is_plain
from ..ops import (
    NormStyle,
    bias_activation_dropout,
    bias_dropout_residual,
    bias_dropout_residual_layer_norm,
    check_activation,
    check_style,
)
from .fused_op import check_names, op_for
from .norm import LayerNorm, join
from .option import NotNegative, Probability, Size, checked
from .registry import register


class BiasedOp(nn.Module):
    """The base of layers that are one op with a learned bias.

    Args:
        p: dropout probability, 0 <= p <= 1.
        bias_shape: N, the size of the bias, a parameter that starts at zero; None for no bias.
        backend: "auto" calls the op, which chooses its kernel; the name of a backend runs the op through
            `fuselayers.fuse`.
        partition: how `fuse` chooses the values saved for backward; the backend "auto" does not use it.

    Raises:
        ValueError: p is outside [0, 1], a size is below one, or there is no such backend or partition.
        TypeError: the backend is not a name, such as None.
    """

    built_in: ClassVar[frozenset[str]] = frozenset({"backend", "partition"})

    @checked
    def __init__(
        self, op: Callable[..., Any], *, p: Probability, bias_shape: Size | None, backend: str, partition: str
    ) -> None:
        super().__init__()
        check_names(backend, partition)
        self.op = op
        self.p = p
        self.backend = backend
        self.partition = partition
        self.bias = nn.Parameter(torch.empty(bias_shape)) if bias_shape is not None else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill the bias with zeros."""
        if self.bias is not None:
            self.bias.zero_()

    def _bias_like(self, x: Tensor) -> Tensor | None:
        # Under autocast x is bfloat16, from a matmul; a float32 bias would make the result float32.
        return None if self.bias is None else self.bias.to(x.dtype)

    def _call(self, *tensors: Tensor, bias: Tensor | None, **arguments: Any) -> Any:
        op = op_for(self.op, backend=self.backend, partition=self.partition)
        return op(*tensors, bias=bias, p=self.p, training=self.training, **arguments)

    def extra_repr(self) -> str:
        bias_shape = None if self.bias is None else self.bias.numel()
        return f"p={self.p}, bias_shape={bias_shape}, backend={self.backend!r}, partition={self.partition!r}"


@register("fused", "bias_activation_dropout")
class FusedBiasActivationDropout(BiasedOp):
    """Bias, activation and dropout in one op.

    The result has x's dtype: the bias is converted to it. The arguments and errors of `BiasedOp`, and:

    Args:
        activation: a name in `ops.ACTIVATIONS`, or None for the identity.

    Raises:
        ValueError: there is no such activation.

    >>> layer = FusedBiasActivationDropout(0.1, 4, activation="relu", backend="eager")
    >>> layer.eval()(torch.tensor([-1.0, 0.0, 1.0, 2.0])).tolist()
    [0.0, 0.0, 1.0, 2.0]
    """

    @checked
    def __init__(
        self,
        p: Probability,
        bias_shape: Size | None = None,
        *,
        activation: str | None = None,
        backend: str = "auto",
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


@register("fused", "bias_dropout_residual")
class FusedBiasDropoutResidual(BiasedOp):
    """Bias, dropout and the residual sum in one op.

    The bias is converted to x's dtype, so the result has the dtype of x + residual. The arguments and errors are those
    of `BiasedOp`.

    >>> layer = FusedBiasDropoutResidual(0.1, 2, backend="eager")
    >>> layer.eval()(torch.tensor([1.0, 2.0]), torch.tensor([10.0, 10.0])).tolist()
    [11.0, 12.0]
    """

    @checked
    def __init__(
        self,
        p: Probability,
        bias_shape: Size | None = None,
        *,
        backend: str = "auto",
        partition: str = "min_cut",
    ) -> None:
        super().__init__(bias_dropout_residual, p=p, bias_shape=bias_shape, backend=backend, partition=partition)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """[..., N], [..., N] -> [..., N]."""
        y: Tensor = self._call(x, residual, bias=self._bias_like(x))
        return y


@register("fused", "bias_dropout_residual_layer_norm")
class FusedBiasDropoutResidualLayerNorm(BiasedOp):
    """Bias, dropout, sum and layer norm in one op.

    With d = dropout(x + bias, p) and s = d + residual, the style "post" is norm(s), "pre" is norm(d) + residual and
    "prenorm" is the pair (norm(s), s).

    The bias keeps its dtype: under autocast, where x is bfloat16, a float32 bias makes s and the results float32, as
    torch's layer norm does on a GPU.

    The op includes the norm if `norm` is an unmodified `LayerNorm`. Another module in its place, or a norm with hooks,
    is called after the other ops, with the same dropout mask. The arguments and errors of `BiasedOp`, and:

    Args:
        d_model: N, the size of the last dimension and of the norm's parameters.
        style: "post", "pre" or "prenorm".
        eps: added to the variance.

    Raises:
        ValueError: bias_shape is not d_model, or there is no such style.

    >>> layer = FusedBiasDropoutResidualLayerNorm(0.1, 2, style="prenorm", backend="eager")
    >>> normed, total = layer.eval()(torch.tensor([1.0, 2.0]), torch.tensor([10.0, 10.0]))
    >>> total.tolist()
    [11.0, 12.0]
    """

    @checked
    def __init__(
        self,
        p: Probability,
        d_model: Size,
        *,
        bias_shape: Size | None = None,
        style: NormStyle = "post",
        eps: NotNegative = 1e-5,
        backend: str = "auto",
        partition: str = "min_cut",
    ) -> None:
        check_style(style)
        if bias_shape is not None and bias_shape != d_model:
            raise ValueError(f"bias_shape must be d_model {d_model} or None, got {bias_shape}")
        super().__init__(
            bias_dropout_residual_layer_norm, p=p, bias_shape=bias_shape, backend=backend, partition=partition
        )
        self.style: NormStyle = style
        self.norm = LayerNorm(d_model, eps=eps)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """[..., N], [..., N] -> [..., N], or two of them for the style "prenorm"."""
        norm = self.norm
        # The same holds for a norm as in Note: [guards of a split linear].
        if type(norm) is not LayerNorm or not is_plain(norm):
            return join(norm, x, residual, self.bias, p=self.p, style=self.style, training=self.training)
        y: Tensor | tuple[Tensor, Tensor] = self._call(
            x, residual, bias=self.bias, weight=norm.weight, norm_bias=norm.bias, eps=norm.eps, style=self.style
        )
        return y

    def extra_repr(self) -> str:
        return f"style={self.style!r}, {super().extra_repr()}"
