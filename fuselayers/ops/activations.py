"""activations -- the elementwise nonlinearities of the feedforward ops, by name.

    relu          max(z, 0)
    leaky_relu    z where z > 0, else 0.01 z
    gelu          z Phi(z), Phi the standard normal distribution function (erf form)
    gelu_tanh     the tanh approximation of gelu that GPT-2 was trained with
    silu          z sigmoid(z), also called swish
    squared_relu  max(z, 0)^2
    star_relu     0.8944 max(z, 0)^2 - 0.4472: unit variance and zero mean for a standard normal z
    smelu         smooth relu: 0 below -b, (z + b)^2 / 4b between, z above b, with b = 2
    None          the identity

gelu: Hendrycks, Gimpel 2016. squared_relu: So et al., "Primer", 2021. star_relu: Yu et al., "MetaFormer baselines for
vision", 2022, eq. 5. smelu: Shamir et al., "Real world large scale recommendation systems reproducibility", 2022.
"""

from collections.abc import Callable
from types import MappingProxyType
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from ..names import no_such
from .shapes import check_floating

__all__ = ["ACTIVATIONS", "activate", "check_activation"]

_STAR_RELU_SCALE: Final = 0.8944
_STAR_RELU_SHIFT: Final = 0.4472
_SMELU_BETA: Final = 2.0


def _gelu_tanh(z: Tensor) -> Tensor:
    return F.gelu(z, approximate="tanh")


def _squared_relu(z: Tensor) -> Tensor:
    positive = torch.relu(z)
    return positive * positive


def _star_relu(z: Tensor) -> Tensor:
    return _STAR_RELU_SCALE * _squared_relu(z) - _STAR_RELU_SHIFT


def _smelu(z: Tensor) -> Tensor:
    # A clamp to [-b, b] gives the parabola on its interval and its end values outside; what lies above b is added.
    inner = torch.clamp(z, -_SMELU_BETA, _SMELU_BETA) + _SMELU_BETA
    # relu(z - b), which would keep its result for backward; threshold keeps z, which clamp keeps already.
    above = F.threshold(z, _SMELU_BETA, _SMELU_BETA) - _SMELU_BETA
    return inner * inner / (4 * _SMELU_BETA) + above


ACTIVATIONS: Final[MappingProxyType[str, Callable[[Tensor], Tensor]]] = MappingProxyType(
    {
        "relu": torch.relu,
        "leaky_relu": F.leaky_relu,
        "gelu": F.gelu,
        "gelu_tanh": _gelu_tanh,
        "silu": F.silu,
        "squared_relu": _squared_relu,
        "star_relu": _star_relu,
        "smelu": _smelu,
    }
)


def check_activation(activation: str | None) -> None:
    """Raise unless `activation` is None or one of ACTIVATIONS: TypeError for what is no name, ValueError for others."""
    if activation is not None and not isinstance(activation, str):
        raise TypeError(f"activation must be a name or None, got a {type(activation).__name__}")
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(no_such("activation", activation, ACTIVATIONS))


def activate(z: Tensor, activation: str | None) -> Tensor:
    """Return the activation of z, elementwise; None returns z itself.

    Raises:
        ValueError: no such activation; the message lists what there is.
        TypeError: z is not floating, or the activation is not a name.

    >>> activate(torch.tensor([-1.0, 3.0]), "squared_relu")
    tensor([0., 9.])
    """
    check_activation(activation)
    check_floating("z", z)
    return z if activation is None else ACTIVATIONS[activation](z)
