"""saved_bytes -- the memory that a call saves for its backward, by hooks on saved tensors."""

import gc
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..._torch.dispatch import PLAIN_TENSORS, storage_key, tree_leaves
from ..._torch.guards import outside_dynamo


@dataclass(frozen=True)
class Saved:
    """Bytes that one call keeps for backward.

    Attributes:
        total: the bytes of all storages that backward reads, except those of parameters and buffers.
        held: the bytes of the storages that hooks on saved tensors (checkpoints, offloading) cannot free.
    """

    total: int
    held: int


def saved_bytes(fn: Callable[..., Any], *args: Any, parameters: Iterable[Tensor] = (), **kwargs: Any) -> int:
    """Run an eager or a fused function, and return the bytes that autograd saves for its backward.

    Each storage counts once, however many tensors share it. The parameters and buffers of `fn`, if it is a module, and
    the tensors in `parameters` do not count, since they stay in memory anyway.

    Args:
        fn: a function or a module whose result depends on a tensor that requires grad.
        *args: its arguments.
        parameters: further tensors that do not count.
        **kwargs: its keyword arguments.

    >>> x = torch.randn(8, 16, requires_grad=True)
    >>> saved_bytes(torch.sin, x)
    512
    """
    exempt = [*parameters, *((*fn.parameters(), *fn.buffers()) if isinstance(fn, nn.Module) else ())]
    # The first call compiles without the hooks: Dynamo guards on them.
    fn(*args, **kwargs)
    return saved_by_call(lambda: fn(*args, **kwargs), exempt=exempt)


def saved_by_call(call: Callable[[], Any], *, exempt: Iterable[Tensor]) -> int:
    """Make one call and return the bytes saved for its backward, without those of the `exempt` tensors.

    Used by `saved_bytes`, `explain` and `swap`, and, with fake tensors, by `configs.model_costs`.
    """
    _, sizes = _saved_storages(call, keep=True)
    return _total(sizes, exempt)


def saved_and_held(call: Callable[[], Any], *, exempt: Iterable[Tensor]) -> Saved:
    """Make a call twice, and return the bytes that the second call keeps, also by other references. Used by `swap`.

    Hooks drop the tensors that autograd saves. A storage that is still alive is held by something else, such as a
    closure in a custom function. No backward can follow.
    """
    call()  # compiles, and fills caches
    gc.collect()
    before = _alive()
    result, sizes = _saved_storages(call, keep=False)
    results = set(map(storage_key, tensors_of(result)))
    held = {key: size for key, size in _alive().items() if key not in before and key not in results}
    return Saved(_total(sizes | held, exempt), sum(held.values()))


def tensors_of(values: Any) -> list[Tensor]:
    """Return the tensors in a tree of values."""
    values = dict(values) if isinstance(values, Mapping) else values  # an output of transformers
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _saved_storages(call: Callable[[], Any], *, keep: bool) -> tuple[Any, dict[Hashable, int]]:
    """Return the result of a call, and the bytes of each storage it saves. Without `keep` saved tensors are dropped.

    This is the one place where saved bytes are counted.
    """
    sizes: dict[Hashable, int] = {}

    @outside_dynamo
    def pack(tensor: Tensor) -> Tensor | None:
        sizes[storage_key(tensor)] = tensor.untyped_storage().nbytes()
        # Not the tensor itself: the node that made it would hold itself, and its graph would never be freed.
        return tensor.detach() if keep else None

    def unpack(kept: Tensor | None) -> Tensor:
        assert kept is not None, "no backward runs here"
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return call(), sizes


def _total(sizes: dict[Hashable, int], exempt: Iterable[Tensor]) -> int:
    excluded = set(map(storage_key, exempt))
    return sum(size for key, size in sizes.items() if key not in excluded)


def _alive() -> dict[Hashable, int]:
    """The storages of all tensors in Python, and their sizes."""
    sizes: dict[Hashable, int] = {}
    for value in gc.get_objects():
        # Not isinstance: a lazy proxy may import its module for it.
        if type(value) in PLAIN_TENSORS:
            try:
                sizes[storage_key(value)] = value.untyped_storage().nbytes()
            except (NotImplementedError, RuntimeError):  # such as a sparse tensor
                continue
    return sizes
