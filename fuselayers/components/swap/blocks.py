"""Repeated blocks as one fused function per class."""

import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..._torch.dispatch import is_compiling
from ...partition import fuse
from .fallbacks import note
from .key_values import entry_to_fill, find_cache, with_callers, with_states
from .sites import subclass

__all__ = ["block_class", "repeated_blocks"]


def repeated_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the blocks of a model by qualified name: two or more modules of one class in a list, with linear layers.

    Of lists within lists only the outer ones count.
    """
    inside: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") for outer in inside):
            continue
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(module) < 2:
            continue
        kinds = {type(block) for block in module}
        if len(kinds) == 1 and any(isinstance(part, nn.Linear) or _is_conv1d(part) for part in module[0].modules()):
            inside.append(name)
            for key, block in module.named_children():
                yield f"{name}.{key}", block


def _is_conv1d(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D"


@functools.cache
def block_class(cls: Any, backend: str) -> type:
    """Return a subclass whose forward is `cls.forward`, fused, in training and wherever a gradient can be asked for.

    One fused function serves all blocks of a class: their parameters are inputs of its graphs. Sizes are dynamic from
    the start. In evaluation without gradients there is nothing to save, and a cache of keys and values may be filled:
    then the block's own forward runs. In training the fused one runs without gradients too, as reentrant checkpointing
    calls it: backward must drop the same elements.
    """
    forward = cls.forward
    own = inspect.signature(forward).parameters.values()
    names = tuple(one.name for one in own if one.kind is one.POSITIONAL_OR_KEYWORD)[1:]
    fused = fuse(forward, backend=backend, dynamic=True)
    # Made by the first call with a cache: there is none without transformers.
    fused_with_states = functools.cache(lambda: fuse(with_states(forward), backend=backend, dynamic=True))

    @functools.wraps(forward)
    def fused_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or not (torch.is_grad_enabled() or self.training):  # a compiler fuses the block itself
            return forward(self, *args, **kwargs)
        given = dict(zip(names, args, strict=False))
        arguments = {**given, **kwargs}
        name = find_cache(arguments)
        if name is None or len(args) > len(names) or not given.keys().isdisjoint(kwargs):
            return fused(self, *args, **kwargs)
        cache = arguments[name]
        entry = entry_to_fill(self, cache) if torch.is_grad_enabled() else None
        if entry is None:
            note(
                self, f"its {name} is a cache that it fills in a way of its own; in training, use_cache=False avoids it"
            )
            return forward(self, *args, **kwargs)
        result, states = fused_with_states()(self, {**arguments, name: None}, name)
        if states is not None:
            cache.update(*states, entry)
        return with_callers(result, cache)

    members = {"forward": fused_forward, "found": (), "block_backend": backend, "__reduce_ex__": _reduce}
    return subclass(cls, members)


def _reduce(module: nn.Module, protocol: int) -> tuple[Any, ...]:
    kind: Any = type(module)
    return _loaded, (kind.swapped_from, kind.block_backend), module.__dict__


def _loaded(cls: type, backend: str) -> nn.Module:
    module: nn.Module = object.__new__(block_class(cls, backend))
    return module
