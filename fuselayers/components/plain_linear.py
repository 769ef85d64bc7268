"""Whether a layer may use the weight and bias of a linear layer without calling it."""

from torch import nn

from .hooks import has_hooks

__all__ = ["is_plain_linear"]


def is_plain_linear(layer: nn.Module) -> bool:
    """Return whether calling the layer does nothing but x @ weight.T + bias.

    >>> is_plain_linear(nn.Linear(2, 3)), is_plain_linear(nn.utils.parametrizations.weight_norm(nn.Linear(2, 3)))
    (True, False)
    """
    # Note: [guards of a split linear] Using the weight and bias of a layer bypasses its forward. That is right only for
    # an unmodified nn.Linear: an adapter, a parametrisation (a subclass), a patched forward or a hook must be called.
    return type(layer) is nn.Linear and "forward" not in layer.__dict__ and not has_hooks(layer)
