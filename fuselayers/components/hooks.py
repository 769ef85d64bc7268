"""Checks whether a call of a module does more than its forward. Used before a module is bypassed."""

import sys

from torch import nn

from .linear import Linear


def has_hooks(module: nn.Module) -> bool:
    """Return whether the module itself has a hook on its forward or backward; the modules inside it do not count.

    >>> layer = nn.Linear(2, 3)
    >>> handle = layer.register_forward_hook(lambda *_: None)
    >>> has_hooks(layer), has_hooks(nn.Sequential(layer))
    (True, False)
    """
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)


def is_sharded(module: nn.Module) -> bool:
    """Return whether FSDP, version 1 or 2, is applied to the module itself; the modules inside it do not count.

    >>> is_sharded(nn.Linear(2, 3))
    False
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")  # no module is sharded before it is imported
    return fsdp is not None and isinstance(module, (fsdp.FSDPModule, fsdp.FullyShardedDataParallel))


def is_plain_linear(layer: nn.Module) -> bool:
    """Return whether calling the layer does nothing but x @ weight.T + bias.

    >>> is_plain_linear(nn.Linear(2, 3)), is_plain_linear(nn.utils.parametrizations.weight_norm(nn.Linear(2, 3)))
    (True, False)
    """
    # Note: [guards of a split linear] Using the weight and bias of a layer bypasses its forward. That is right only for
    # an unmodified linear layer: an adapter, a parametrisation (a subclass), a patched forward or a hook must run.
    # `parallelize` also makes a subclass, but changes only how the weights are read.
    kind = getattr(type(layer), "reads_parts_of", type(layer))
    return kind in (nn.Linear, Linear) and "forward" not in layer.__dict__ and not has_hooks(layer)
