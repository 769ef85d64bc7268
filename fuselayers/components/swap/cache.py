"""A hook that passes `use_cache=False` to a model of transformers in training, unless the caller passes `use_cache`.

By default such a model fills a cache of keys and values in each call, which training does not read. Each block writes
to the cache entry of its layer number, so a compiler would make one graph per block.
"""

import functools
import inspect
import sys
from typing import Any, Final

from torch import nn


def _without_cache(
    names: tuple[str, ...], module: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """The hook of a module whose positional arguments have these names."""
    passed = {**dict(zip(names, args, strict=False)), **kwargs}
    is_said = kwargs.get("use_cache") is not None or "use_cache" in names[: len(args)]
    # Without a cache and a mask, transformers takes a position that starts again for a new sequence, and hides the
    # sequences from each other.
    may_pack = passed.get("position_ids") is not None and passed.get("attention_mask") is None
    if not module.training or is_said or may_pack or any(map(is_cache, passed.values())):
        return args, kwargs
    return args, {**kwargs, "use_cache": False}


_MASKED_WITHOUT_CACHE: Final = frozenset({"fsmt"})
"""Models that hide later tokens only without a cache, so that their results depend on it. Checked with 5.24."""


def hook_cache(model: nn.Module) -> bool:
    """Hook each outermost model of transformers that takes `use_cache`; return whether there is one."""
    transformers: Any = sys.modules.get("transformers.modeling_utils")
    if transformers is None:
        return False
    hooked: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, transformers.PreTrainedModel):
            continue
        names = tuple(inspect.signature(type(module).forward).parameters)[1:]
        if module.config.model_type in _MASKED_WITHOUT_CACHE:
            continue
        if "use_cache" in names and not any(not outer or name.startswith(f"{outer}.") for outer in hooked):
            module.register_forward_pre_hook(functools.partial(_without_cache, names), with_kwargs=True)
            hooked.append(name)
    return bool(hooked)


def unhook_cache(model: nn.Module) -> None:
    """Remove the hooks of `hook_cache`."""
    for module in model.modules():
        hooks: dict[int, Any] = module._forward_pre_hooks
        ours = [key for key, hook in hooks.items() if getattr(hook, "func", None) is _without_cache]
        for key in ours:
            del hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)


def is_cache(value: Any) -> bool:
    """Return whether a value is a cache of transformers."""
    utils = sys.modules.get("transformers.cache_utils")
    return utils is not None and isinstance(value, utils.Cache)
