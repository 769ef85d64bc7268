"""The storages that a call keeps alive for backward, by hooks on saved tensors or by any other reference."""

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

__all__ = ["Saved", "saved_by", "tensors_of"]


@dataclass(frozen=True)
class Saved:
    """Bytes that one call keeps for backward.

    Attributes:
        total: of all storages that backward reads, but for those of parameters and buffers.
        held: of the storages that hooks on saved tensors, as those of checkpoints and offloading, cannot free.
    """

    total: int
    held: int


def saved_by(call: Callable[[], Any], model: nn.Module) -> Saved:
    """Make a call twice, the second time to see what it keeps; `model` is the module that it calls.

    Autograd hands each saved tensor to hooks, which drop it here. A storage that is still alive is held by something
    else, such as a closure in a custom function.
    """
    call()  # compiles, and fills caches of its own
    gc.collect()
    own = {_key(tensor) for tensor in (*model.parameters(), *model.buffers())}
    before = _alive()
    packed: dict[int, int] = {}
    kept: list[StorageWeakRef] = []  # so that no address stands for two storages

    def pack(tensor: Tensor) -> None:
        kept.append(StorageWeakRef(tensor.untyped_storage()))  # type: ignore[no-untyped-call]
        packed[_key(tensor)] = tensor.untyped_storage().nbytes()

    with torch.autograd.graph.saved_tensors_hooks(pack, _no_backward):
        result = call()
    results = {_key(tensor) for tensor in tensors_of(result)}
    held = {key: size for key, size in _alive().items() if key not in before and key not in results}
    total = {key: size for key, size in {**packed, **held}.items() if key not in own}
    return Saved(sum(total.values()), sum(held.values()))


def _no_backward(_: None) -> Tensor:
    raise AssertionError("no backward runs here")


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _alive() -> dict[int, int]:
    """The storages of all tensors in Python, and their sizes."""
    sizes: dict[int, int] = {}
    for value in gc.get_objects():
        # Not isinstance: a proxy may import what it stands for.
        if type(value) in (Tensor, nn.Parameter):
            try:
                sizes[_key(value)] = value.untyped_storage().nbytes()
            except (NotImplementedError, RuntimeError):  # a sparse tensor, for one
                continue
    return sizes


def tensors_of(values: Any) -> list[Tensor]:
    """The tensors in a tree of values."""
    values = dict(values) if isinstance(values, Mapping) else values  # an output of transformers
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
