"""Repeated blocks as one fused function per class."""

import functools
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import nn

from ..._torch.dispatch import is_compiling
from ...partition import fuse
from .cache import find_cache
from .fallbacks import note
from .layer import subclass
from .parts import is_linear
from .seeded_attention import SeededDropout


def repeated_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the blocks of a model by qualified name: two or more modules of one class and size in a list, with linear
    layers inside.

    A list inside a list does not count. Stages of different widths are no blocks; the layers that a stage repeats are.
    """
    inside: list[str] = []
    for name, module in model.named_modules():
        if any(not outer or name.startswith(f"{outer}.") for outer in inside):
            continue
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(module) < 2:
            continue
        _, *parts = module[0].modules()
        if _are_alike(*module) and any(isinstance(part, nn.Linear) or is_linear(part) for part in parts):
            inside.append(name)
            for key, block in module.named_children():
                yield f"{name}.{key}" if name else key, block


def share_graphs(blocks: Sequence[nn.Module]) -> bool:
    """Return whether there are blocks, and one or two graphs serve all blocks of a class."""
    classes: dict[type, list[nn.Module]] = {}
    for block in blocks:
        classes.setdefault(type(block), []).append(block)
    return bool(blocks) and all(_are_alike(*alike) for alike in classes.values())


def _are_alike(first: nn.Module, *others: nn.Module) -> bool:
    """Whether modules are of one class, and parameters of the same name of the same size."""
    sizes = {name: parameter.shape for name, parameter in first.named_parameters()}
    return all(
        type(other) is type(first)
        # The first block of a T5 has one more, its relative positions.
        and all(sizes.get(name, parameter.shape) == parameter.shape for name, parameter in other.named_parameters())
        for other in others
    )


def block_class(block: nn.Module, backend: str, compress: str | None) -> type:
    """Return a subclass whose forward is that of the block's class, fused, in training and wherever a gradient can be
    asked for.

    One fused function serves all blocks of a class with parameters of the same sizes, which are inputs of its graphs. A
    size of an input becomes symbolic when it first changes: from the start it would take minutes to trace a window of
    an image. In evaluation without gradients there is nothing to save, and a cache of keys and values may be filled:
    then the block's own forward runs. In training the fused one runs without gradients too, as reentrant checkpointing
    calls it: backward must drop the same elements.
    """
    sizes = tuple((name, parameter.shape) for name, parameter in block.named_parameters())
    return _block_class(type(block), backend, compress, sizes)


def _block_class(cls: Any, backend: str, compress: str | None, sizes: Hashable) -> type:
    return _block_class_of(cls, cls.forward, backend, compress, sizes)


@functools.cache
def _block_class_of(cls: Any, forward: Callable[..., Any], backend: str, compress: str | None, sizes: Hashable) -> type:
    """The class as long as the block's class has this forward: a patch may give it another one."""
    fused = fuse(
        _with_seeded_attention(forward, f"{cls.__name__}_{next(_numbers)}"), backend=backend, compress=compress
    )

    @functools.wraps(forward)
    def fused_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or not (torch.is_grad_enabled() or self.training):  # a compiler fuses the block itself
            return forward(self, *args, **kwargs)
        if find_cache((*args, *kwargs.values())):
            note(self, "it fills a cache of keys and values, which use_cache=False leaves out")
            return forward(self, *args, **kwargs)
        return fused(self, *args, **kwargs)

    options = {"block_backend": backend, "block_compress": compress, "block_function": fused}
    members = {"forward": fused_forward, "rule": "block", **options}
    return subclass(cls, members, _block_class, cls, backend, compress, sizes)


_numbers: Final = itertools.count()


def _with_seeded_attention(forward: Callable[..., Any], name: str) -> Callable[..., Any]:
    # functools.wraps would let Dynamo trace the function inside.
    def call(*args: Any, **kwargs: Any) -> Any:
        with SeededDropout():
            return forward(*args, **kwargs)

    call.__name__ = name  # by which Dynamo remembers the sizes that have changed
    return call
