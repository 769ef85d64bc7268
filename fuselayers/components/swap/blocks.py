"""Repeated blocks as one fused function per class."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..._torch.dispatch import is_compiling
from ...partition import fuse
from .cache import find_cache
from .fallbacks import note
from .layer import subclass
from .parts import is_linear
from .seeded_attention import SeededDropout

__all__ = ["block_class", "repeated_blocks"]


def repeated_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the blocks of a model by qualified name: two or more modules of one class in a list, with linear layers
    inside.

    Of lists within lists only the outer ones count.
    """
    inside: list[str] = []
    for name, module in model.named_modules():
        if any(not outer or name.startswith(f"{outer}.") for outer in inside):
            continue
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(module) < 2:
            continue
        kinds = {type(block) for block in module}
        _, *parts = module[0].modules()
        if len(kinds) == 1 and any(isinstance(part, nn.Linear) or is_linear(part) for part in parts):
            inside.append(name)
            for key, block in module.named_children():
                yield f"{name}.{key}" if name else key, block


@functools.cache
def block_class(cls: Any, backend: str, compress: str | None) -> type:
    """Return a subclass whose forward is `cls.forward`, fused, in training and wherever a gradient can be asked for.

    One fused function serves all blocks of a class: their parameters are inputs of its graphs. Sizes are dynamic from
    the start. In evaluation without gradients there is nothing to save, and a cache of keys and values may be filled:
    then the block's own forward runs. In training the fused one runs without gradients too, as reentrant checkpointing
    calls it: backward must drop the same elements.
    """
    forward = cls.forward
    fused = fuse(_with_seeded_attention(forward), backend=backend, compress=compress, dynamic=True)

    @functools.wraps(forward)
    def fused_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or not (torch.is_grad_enabled() or self.training):  # a compiler fuses the block itself
            return forward(self, *args, **kwargs)
        if find_cache((*args, *kwargs.values())):
            note(self, "it fills a cache of keys and values, which use_cache=False leaves out")
            return forward(self, *args, **kwargs)
        return fused(self, *args, **kwargs)

    options = {"block_backend": backend, "block_compress": compress}
    return subclass(cls, {"forward": fused_forward, "rule": "block", "__reduce_ex__": _reduce, **options})


def _with_seeded_attention(forward: Callable[..., Any]) -> Callable[..., Any]:
    # functools.wraps would let Dynamo trace the function inside.
    def call(*args: Any, **kwargs: Any) -> Any:
        with SeededDropout():
            return forward(*args, **kwargs)

    return call


def _reduce(module: nn.Module, protocol: int) -> tuple[Any, ...]:
    kind: Any = type(module)
    options = kind.swapped_from, kind.block_backend, kind.block_compress
    return _loaded, options, module.__getstate__()  # type: ignore[no-untyped-call]


def _loaded(cls: type, backend: str, compress: str | None = None) -> nn.Module:
    module: nn.Module = object.__new__(block_class(cls, backend, compress))
    return module
