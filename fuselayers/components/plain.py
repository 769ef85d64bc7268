"""Checks that a layer may be bypassed: that a call of it is a formula of its parameters."""

import sys
from typing import Any

from torch import nn

from .._torch.dispatch import PLAIN_OR_FAKE_TENSORS
from .._torch.modules import is_plain
from ..module_class import unchanged_class
from .linear import Linear


def is_parameter(value: Any) -> bool:
    """Return whether a value is a whole floating-point parameter, neither sharded nor quantised.

    During a call it may be a plain tensor, which FSDP1 and `torch.func.functional_call` put there. In a model without
    memory it may be a fake tensor.

    >>> is_parameter(nn.Linear(2, 3).weight)
    True
    """
    return type(value) in PLAIN_OR_FAKE_TENSORS and value.is_floating_point()


def is_plain_linear(layer: Any) -> bool:
    """Return whether calling the layer does nothing but x @ weight.T + bias, with plain parameters.

    >>> is_plain_linear(nn.Linear(2, 3)), is_plain_linear(nn.utils.parametrizations.weight_norm(nn.Linear(2, 3)))
    (True, False)
    """
    # Note: [guards of a split linear] Using the weight and bias of a layer bypasses its forward. That is right only for
    # an unmodified linear layer: an adapter, a parametrisation (a subclass), a patched forward or a hook must run.
    # `parallelize` also makes a subclass, but changes only how the weights are read; `swap` only the kernel.
    return unchanged_class(layer) in (nn.Linear, Linear) and has_plain_weights(layer)


def has_plain_weights(layer: Any) -> bool:
    """Return whether a layer with a weight and a bias is plain, and so are these. Used for known kinds of layers."""
    return is_plain(layer) and is_parameter(layer.weight) and (layer.bias is None or is_parameter(layer.bias))


def is_sharded(module: nn.Module) -> bool:
    """Return whether FSDP, version 1 or 2, is applied to the module itself; the modules inside it do not count.

    >>> is_sharded(nn.Linear(2, 3))
    False
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")  # no module is sharded before it is imported
    return fsdp is not None and isinstance(module, (fsdp.FSDPModule, fsdp.FullyShardedDataParallel))
