"""modules -- whether a call of a module does more than run its forward."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.module import _has_any_global_hook

# True if one is set, for example by `torch.nn.modules.module.register_module_forward_hook`.
hooks_of_all_modules: Callable[[], object] = _has_any_global_hook


def has_hooks(module: nn.Module) -> bool:
    """Return whether the module itself has a hook on its forward or backward; the modules inside it do not count.

    >>> layer = nn.Linear(2, 3)
    >>> handle = layer.register_forward_hook(lambda *_: None)
    >>> has_hooks(layer), has_hooks(nn.Sequential(layer))
    (True, False)
    """
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)


def is_plain(module: Any) -> bool:
    """Return whether calling a module runs the forward of its class and nothing else: no hook, also none of all
    modules, no other forward of its own, nothing compiled. Used before a module is bypassed.

    >>> layer = nn.Linear(2, 3)
    >>> is_plain(layer)
    True
    >>> layer.forward = layer.forward
    >>> is_plain(layer)
    False
    """
    if not isinstance(module, nn.Module) or has_hooks(module) or hooks_of_all_modules():
        return False
    if any(name in module.__dict__ for name in ("forward", "_call_impl", "_wrapped_call_impl")):
        return False
    return module.__dict__.get("_compiled_call_impl") is None
