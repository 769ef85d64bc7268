"""In training a model of transformers is called with `use_cache=False`, unless its caller says otherwise.

By default such a model fills a cache of keys and values in each call, which nobody reads in training. A block that fills
a cache writes to the entry of its own number, so a compiler would make a graph for each block.
"""

import inspect
import sys
from collections.abc import Iterable
from functools import cache
from typing import Any

from torch import nn

__all__ = ["find_cache", "is_cache", "with_cache", "without_cache"]


def without_cache(model: nn.Module) -> bool:
    """Hook each outermost module that takes `use_cache`; return whether there is one."""
    hooked: list[str] = []
    for name, module in model.named_modules():
        inside = any(not outer or name.startswith(f"{outer}.") for outer in hooked)
        if not inside and "use_cache" in inspect.signature(type(module).forward).parameters:
            module.register_forward_pre_hook(_call_without_cache, with_kwargs=True)
            hooked.append(name)
    return bool(hooked)


def with_cache(model: nn.Module) -> None:
    """Remove the hooks of `without_cache`."""
    for module in model.modules():
        ours = [key for key, hook in module._forward_pre_hooks.items() if hook is _call_without_cache]
        for key in ours:
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)


def _call_without_cache(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    given = kwargs.get("use_cache") is not None or len(args) > _position(type(module))
    if not module.training or given or find_cache((*args, *kwargs.values())):
        return args, kwargs
    return args, {**kwargs, "use_cache": False}


@cache
def _position(cls: Any) -> int:
    return list(inspect.signature(cls.forward).parameters).index("use_cache") - 1


def find_cache(values: Iterable[Any]) -> bool:
    """Return whether one of the values is a cache of transformers."""
    return any(map(is_cache, values))


def is_cache(value: Any) -> bool:
    """Return whether a value is a cache of transformers."""
    utils = sys.modules.get("transformers.cache_utils")
    return utils is not None and isinstance(value, utils.Cache)
