"""The hidden width and the activation of the feedforwards.

x, z   [..., D], [..., F]   D model, F hidden
"""

from torch import Tensor, nn

from ...ops import ACTIVATIONS, activate, check_activation
from ..option import create


def hidden_width(hidden_dim: int, *, expansion: float, width: int | None = None, multiple_of: int = 1) -> int:
    """Return F: `width` if given, else expansion * hidden_dim, rounded down, then up to a multiple.

    Raises:
        ValueError: the result is below one.

    >>> hidden_width(96, expansion=8 / 3), hidden_width(64, expansion=8 / 3, multiple_of=32)
    (256, 192)
    >>> hidden_width(96, expansion=8 / 3, width=7)
    7
    """
    if width is not None:
        return width
    rounded = -(-int(expansion * hidden_dim) // multiple_of) * multiple_of
    if rounded < 1:
        raise ValueError(f"expansion must give at least one hidden value, got {expansion} for hidden_dim {hidden_dim}")
    return rounded


def custom_activation(activation: str | None) -> nn.Module | None:
    """Return the module of a registered activation; None for an activation in `ops.ACTIVATIONS`.

    Raises:
        ValueError: no activation of that name is registered, or it has an option without a default.
        TypeError: the activation is neither a name nor None.

    >>> custom_activation("gelu") is None
    True
    """
    if not isinstance(activation, str) or activation in ACTIVATIONS:
        check_activation(activation)
        return None
    built: nn.Module = create("activation", activation)
    return built


def activated(z: Tensor, activation: str | None, custom: nn.Module | None) -> Tensor:
    """Return the activation of z, by the custom module if there is one, else by the op of that name."""
    if custom is None:
        return activate(z, activation)
    y: Tensor = custom(z)
    return y
