"""Whether a call of a module runs hooks too. Used where a module's parts are run and the module is not called."""

from torch import nn

__all__ = ["has_hooks"]


def has_hooks(module: nn.Module) -> bool:
    """Return whether the module itself has a hook on its forward or backward; the modules inside it do not count.

    >>> layer = nn.Linear(2, 3)
    >>> handle = layer.register_forward_hook(lambda *_: None)
    >>> has_hooks(layer), has_hooks(nn.Sequential(layer))
    (True, False)
    """
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)
