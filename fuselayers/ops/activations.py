"""activations -- the elementwise nonlinearities of the feedforward ops, by name.

    relu          max(z, 0)
    leaky_relu    z where z > 0, else 0.01 z
    gelu          z Phi(z), Phi the standard normal distribution function (erf form)
    gelu_tanh     the tanh approximation of gelu that GPT-2 was trained with
    silu          z sigmoid(z), also called swish
    squared_relu  max(z, 0)^2
    star_relu     0.8944 max(z, 0)^2 - 0.4472: unit variance and zero mean for a standard normal z
    smelu         smooth relu: 0 below -b, (z + b)^2 / 4b between, z above b, with b = 2
    sigmoid       1 / (1 + exp(-z)), the gate of the first gated linear unit
    None          the identity

gelu: Hendrycks, Gimpel 2016. squared_relu: So et al., "Primer", 2021. star_relu: Yu et al., "MetaFormer baselines for
vision", 2022, eq. 5. smelu: Shamir et al., "Real world large scale recommendation systems reproducibility", 2022.
sigmoid, as a gate: Dauphin et al., "Language modeling with gated convolutional networks", 2016.
"""

from collections.abc import Callable
from types import MappingProxyType
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from ..names import no_such
from .implementations.triton_language import libdevice, tile_function, tl
from .shapes import check_floating

__all__ = ["ACTIVATIONS", "activate", "activate_tile", "check_activation", "slope_tile"]

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
    # At b the slope is that of the linear part: clamp's slope there is 1 before torch 2.14, and 0 since. Autograd saves
    # z, `inner` and the mask of `where`.
    inner = torch.clamp(z, -_SMELU_BETA, _SMELU_BETA) + _SMELU_BETA
    return torch.where(z >= _SMELU_BETA, z, inner * inner / (4 * _SMELU_BETA))


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
        "sigmoid": torch.sigmoid,
    }
)


def check_activation(activation: str | None) -> None:
    """Raise unless `activation` is None or one of ACTIVATIONS: TypeError or ValueError for another value."""
    if activation is not None and not isinstance(activation, str):
        advice = "; register its class with components.register('activation', NAME) and pass the name"
        module = isinstance(activation, torch.nn.Module)
        raise TypeError(f"activation must be a string or None, got a {type(activation).__name__}{advice * module}")
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(no_such("activation", activation, ACTIVATIONS))


def activate(z: Tensor, activation: str | None) -> Tensor:
    """Return the activation of z, elementwise; None returns z itself.

    Raises:
        ValueError: there is no such activation.
        TypeError: z is not dense and floating, or the activation is not a name.

    >>> activate(torch.tensor([-1.0, 3.0]), "squared_relu")
    tensor([0., 9.])
    """
    check_activation(activation)
    check_floating("z", z)
    return z if activation is None else ACTIVATIONS[activation](z)


@tile_function
def _normal_tile(z, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The standard normal distribution function of z, and exp(-z^2 / 2), to which its derivative is proportional."""
    density = tl.exp2(z * z * -0.7213475204444817)
    if EXACT:
        return 0.5 + 0.5 * tl.erf(z * 0.7071067811865476), density
    # The log-odds of the distribution function are z times a smooth function of |z|, approximated by a polynomial: 11
    # instructions per element instead of 38, right for infinities and NaN. The error is at most 7e-6 of z, and 6e-5 of
    # the result for -3 <= z < 0: a tenth of the last bit of float16.
    a = tl.abs(z)
    slope = (((-0.0004185767169 * a + 0.005151251876) * a - 0.01364286931) * a - 0.08870266675) * a - 0.008350429591
    return libdevice.fast_dividef(1.0, 1.0 + tl.exp2(z * (slope * a - 2.300798056))), density


@tile_function
def _sigmoid_tile(z, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    if EXACT:
        return tl.sigmoid(z)
    # 8 instructions per element instead of 16; the error is 2 units in the last place of float32.
    return libdevice.fast_dividef(1.0, 1.0 + tl.exp2(z * -1.4426950408889634))


@tile_function
def activate_tile(z, ACTIVATION: tl.constexpr, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """`activate` of a float32 tile.

    EXACT is for float32 results: it selects the exact expression where the approximation would be visible.
    """
    if ACTIVATION == "relu":
        z = tl.where(z < 0, 0.0, z)  # not tl.maximum, which drops NaN
    elif ACTIVATION == "leaky_relu":
        z = tl.where(z > 0, z, 0.01 * z)
    elif ACTIVATION == "gelu":
        distribution, _ = _normal_tile(z, EXACT)
        z = z * distribution
    elif ACTIVATION == "gelu_tanh":
        z = z * _sigmoid_tile(z * (1.5957691216057308 + 0.07135481627260025 * z * z), EXACT)
    elif ACTIVATION == "silu":
        z = z * _sigmoid_tile(z, EXACT)
    elif ACTIVATION == "squared_relu":
        z = tl.where(z < 0, 0.0, z)
        z = z * z
    elif ACTIVATION == "star_relu":
        z = tl.where(z < 0, 0.0, z)
        z = 0.8944 * z * z - 0.4472
    elif ACTIVATION == "smelu":
        z = tl.where(z < -2.0, 0.0, tl.where(z < 2.0, (z + 2.0) * (z + 2.0) * 0.125, z))
    elif ACTIVATION == "sigmoid":
        z = _sigmoid_tile(z, EXACT)
    else:
        tl.static_assert(ACTIVATION is None)
    return z


@tile_function
def slope_tile(z, ACTIVATION: tl.constexpr, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The derivative of `activate_tile` at z; where it is undefined, torch's choice."""
    if ACTIVATION == "relu":
        slope = tl.where(z <= 0, 0.0, 1.0)
    elif ACTIVATION == "leaky_relu":
        slope = tl.where(z > 0, 1.0, 0.01)
    elif ACTIVATION == "gelu":
        distribution, density = _normal_tile(z, EXACT)
        slope = distribution + z * density * 0.3989422804014327
    elif ACTIVATION == "gelu_tanh":
        square = z * z
        inner = z * (1.5957691216057308 + 0.07135481627260025 * square)
        sigmoid = _sigmoid_tile(inner, EXACT)
        # Near sigmoid = 1, the rounding error of 1 - sigmoid would be multiplied by z cubed.
        complement = _sigmoid_tile(-inner, EXACT) if EXACT else 1.0 - sigmoid
        slope = sigmoid + z * sigmoid * complement * (1.5957691216057308 + 0.21406444881780074 * square)
    elif ACTIVATION == "silu":
        sigmoid = _sigmoid_tile(z, EXACT)
        slope = sigmoid + z * sigmoid * (1.0 - sigmoid)
    elif ACTIVATION == "squared_relu":
        slope = tl.where(z < 0, 0.0, 2.0 * z)
    elif ACTIVATION == "star_relu":
        slope = tl.where(z < 0, 0.0, 1.7888 * z)
    elif ACTIVATION == "smelu":
        slope = tl.where(z >= 2.0, 1.0, tl.where(z > -2.0, (z + 2.0) * 0.25, 0.0))
    elif ACTIVATION == "sigmoid":
        sigmoid = _sigmoid_tile(z, EXACT)
        slope = sigmoid * (1.0 - sigmoid)
    else:
        tl.static_assert(ACTIVATION is None)
        slope = tl.full(z.shape, 1.0, tl.float32)
    return slope
