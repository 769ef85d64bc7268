"""Fuse repeated blocks, with one function per class."""

import collections
import contextlib
import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from ..._torch.dispatch import is_compiling, is_recorded
from ...partition import fuse
from .cache import is_cache
from .capture import captures, nothing_captured
from .fallbacks import note
from .parts import is_linear


def repeated_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the repeated blocks of a model by qualified name.

    Blocks are two or more modules of one class and size in a list, with linear layers inside. Up to a quarter of a
    class may have other sizes, such as the last block of Stable Diffusion 3; those modules are not blocks. Lists inside
    blocks are skipped. Stages of different widths are not blocks, but the repeated layers of a stage are.
    """
    names: list[str] = []
    for name, module in model.named_modules():
        if any(f"{name}.".startswith(f"{block}.") for block in names):
            continue
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            for key, block in itertools.chain.from_iterable(map(_blocks_among, _groups_in(module))):
                block_name = f"{name}.{key}" if name else key
                if block_name not in names:
                    names.append(block_name)
                    yield block_name, block


def _groups_in(modules: nn.ModuleList | nn.Sequential) -> list[dict[str, nn.Module]]:
    """Return the modules in a list by class, if the list repeats each class; in a list of lists, by column and class.

    `for attention, feedforward in layers: ...` is a common way to call a list of lists.
    """
    present = [child for child in modules if child is not None]
    groups: dict[tuple[str, type], dict[str, nn.Module]] = {}
    if all(isinstance(row, nn.ModuleList) for row in present):
        for row_key, row in modules.named_children():
            for column, module in row.named_children():
                groups.setdefault((column, type(module)), {})[f"{row_key}.{column}"] = module
        return [group for group in groups.values() if len(group) > 1]
    if min(collections.Counter(map(type, present)).values()) == 1:
        return []
    for key, module in modules.named_children():  # a module that fills several places is named once
        groups.setdefault(("", type(module)), {})[key] = module
    return list(groups.values())


def _blocks_among(group: Mapping[str, nn.Module]) -> Iterable[tuple[str, nn.Module]]:
    middle = list(group.values())[len(group) // 2]
    if isinstance(middle, (nn.ModuleList, nn.ModuleDict)):  # it has no forward
        return ()
    blocks = {key: module for key, module in group.items() if _are_alike(middle, module)}
    _, *parts = middle.modules()
    has_linear = any(isinstance(part, nn.Linear) or is_linear(part) for part in parts)
    are_most = 4 * (len(group) - len(blocks)) <= len(group)
    return blocks.items() if has_linear and are_most and _are_alike(*blocks.values()) else ()


def share_graphs(blocks: Sequence[nn.Module]) -> bool:
    """Return whether there are blocks, and all blocks of a class share graphs.

    They do not if their sizes differ, or a float of theirs, such as the rate of stochastic depth. A float that forward
    does not read counts too.
    """
    classes: dict[type, list[nn.Module]] = {}
    for block in blocks:
        classes.setdefault(type(block), []).append(block)
    return bool(blocks) and all(_are_alike(*alike) and _agree(map(_floats_of, alike)) for alike in classes.values())


def _are_alike(*modules: nn.Module) -> bool:
    """Return whether the modules have one class, and parameters with the same name have the same size."""
    return len(set(map(type, modules))) == 1 and _agree(dict(sizes_of(module)) for module in modules)


def _floats_of(block: nn.Module) -> dict[Hashable, float]:
    """Return the floats among the attributes of the modules in a block. Dynamo makes constants of them."""
    return {
        (name, attribute): value
        for name, module in block.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, float)
    }


def _agree(mappings: Iterable[Mapping[Any, Any]]) -> bool:
    """Return whether a key has the same value wherever it occurs.

    The first block of a T5 has an extra key, its relative positions.
    """
    together: dict[Any, Any] = {}
    return all(together.setdefault(key, value) == value for mapping in mappings for key, value in mapping.items())


def block_members(cls: Any, backend: str, compress: str | None, sizes: Hashable) -> dict[str, Any]:
    """Return the members of a subclass of a block's class whose forward is fused. See `swapped_class`.

    One fused function serves all blocks of a class whose parameters have the same sizes (see `sizes_of`). The
    parameters are inputs of its graphs. An input's size becomes symbolic only when it first changes: with symbolic
    sizes from the start, tracing a window of an image takes minutes.

    In evaluation without gradients the block's own forward runs: there is nothing to save, and the call may fill a
    cache of keys and values. In training the fused forward runs without gradients too: reentrant checkpointing calls it
    that way, and backward must drop the same elements.
    """
    forward = cls.forward
    name = f"{cls.__name__}_{next(_numbers)}"
    fused = fuse(_to_trace(forward, name, has_captures=False), backend=backend, compress=compress)
    capturing = fuse(_to_trace(forward, f"{name}_capturing", has_captures=True), backend=backend, compress=compress)

    @functools.wraps(forward)
    def fused_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        saves_values = torch.is_grad_enabled() or self.training
        if is_compiling() or is_recorded() or not saves_values:  # a compiler fuses the block itself
            return forward(self, *args, **kwargs)
        if any(map(is_cache, (*args, *kwargs.values()))):
            note(self, "it fills a cache of keys and values; pass use_cache=False")
            return forward(self, *args, **kwargs)
        return (capturing if captures(self) else fused)(self, *args, **kwargs)

    options = {"block_backend": backend, "block_compress": compress, "block_function": fused}
    return {"forward": fused_forward, "rule": "block", **options}


def sizes_of(block: nn.Module) -> tuple[tuple[str, torch.Size], ...]:
    """Return the names and sizes of the parameters."""
    return tuple((name, parameter.shape) for name, parameter in block.named_parameters())


_numbers: Final = itertools.count()


def _to_trace(forward: Callable[..., Any], name: str, *, has_captures: bool) -> Callable[..., Any]:
    """Return a block's forward for Dynamo, without hooks that have nothing to return."""

    # Without functools.wraps, with which Dynamo would trace the wrapped function instead.
    def call(*args: Any, **kwargs: Any) -> Any:
        with contextlib.nullcontext() if has_captures else nothing_captured():
            return forward(*args, **kwargs)

    call.__name__ = name  # Dynamo remembers by this name which sizes have changed
    return call
