"""The activations of `ops.ACTIVATIONS` as modules, for code that needs a module. The formulas are in `ops`."""

from typing import ClassVar

from torch import Tensor, nn

from ..ops import activate
from .registry import register


class Activation(nn.Module):
    """The base of the activations: a subclass names its function in `ops.ACTIVATIONS`."""

    function: ClassVar[str]

    def forward(self, x: Tensor) -> Tensor:
        """Any shape -> the same shape."""
        return activate(x, self.function)


@register("activation", "relu")
class ReLU(Activation):
    """max(x, 0).

    >>> import torch
    >>> ReLU()(torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """

    function = "relu"


@register("activation", "leaky_relu")
class LeakyReLU(Activation):
    """x where x > 0, else 0.01 x."""

    function = "leaky_relu"


@register("activation", "gelu")
class GELU(Activation):
    """x times the standard normal distribution function of x."""

    function = "gelu"


@register("activation", "gelu_tanh")
class GELUTanh(Activation):
    """The tanh approximation of gelu that GPT-2 was trained with."""

    function = "gelu_tanh"


@register("activation", "silu")
class SiLU(Activation):
    """x sigmoid(x), also called swish."""

    function = "silu"


@register("activation", "squared_relu")
class SquaredReLU(Activation):
    """The square of max(x, 0)."""

    function = "squared_relu"


@register("activation", "star_relu")
class StarReLU(Activation):
    """max(x, 0) squared, scaled and shifted to mean 0 and variance 1 for standard normal x."""

    function = "star_relu"


@register("activation", "smelu")
class SmeLU(Activation):
    """relu with a parabola in place of its corner."""

    function = "smelu"


@register("activation", "sigmoid")
class Sigmoid(Activation):
    """1 / (1 + exp(-x)): between 0 and 1, to gate something with."""

    function = "sigmoid"
