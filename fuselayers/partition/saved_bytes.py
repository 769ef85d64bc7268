"""saved_bytes -- a meter for what a call keeps in memory until its backward."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["saved_by_call", "saved_bytes"]


def saved_bytes(fn: Callable[..., Any], *args: Any, parameters: Iterable[Tensor] = (), **kwargs: Any) -> int:
    """Run `fn` once and return the bytes that autograd keeps for its backward.

    Each storage counts once, however many tensors look at it. The parameters of `fn`, if it is a module, and the
    tensors in `parameters` do not count: they live in any case. It measures eager and fused functions alike.

    Args:
        fn: a function or a module whose result depends on a tensor that requires grad.
        *args: passed on.
        parameters: further tensors that do not count.
        **kwargs: passed on.

    >>> x = torch.randn(8, 16, requires_grad=True)
    >>> saved_bytes(torch.sin, x)
    512
    """
    exempt = [*parameters, *(fn.parameters() if isinstance(fn, nn.Module) else ())]
    # A compiled function is compiled by a first call without the hooks: they are part of what it is guarded on.
    fn(*args, **kwargs)
    return saved_by_call(lambda: fn(*args, **kwargs), exempt=exempt)


def saved_by_call(call: Callable[[], Any], *, exempt: Iterable[Tensor]) -> int:
    """Make one call and return the bytes kept for its backward, without those of the `exempt` tensors.

    Used by `saved_bytes` and, with fake tensors, by `configs.model_costs`.
    """
    lives = {_storage(tensor) for tensor in exempt}
    kept: dict[int, int] = {}
    alive: list[Tensor] = []  # so that no storage is freed and its address used again while we count

    def pack(tensor: Tensor) -> Tensor:
        alive.append(tensor.detach())
        kept[_storage(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call()
    return sum(size for storage, size in kept.items() if storage not in lives)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
