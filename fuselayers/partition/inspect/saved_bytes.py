"""saved_bytes -- the memory that a call saves for its backward, by hooks on saved tensors."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..._torch.dispatch import storage_key, tree_leaves


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
    sizes: dict[Hashable, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        sizes[storage_key(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call()
    excluded = set(map(storage_key, exempt))
    return sum(size for key, size in sizes.items() if key not in excluded)


def tensors_of(values: Any) -> list[Tensor]:
    """Return the tensors in a tree of values."""
    values = dict(values) if isinstance(values, Mapping) else values  # an output of transformers
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
