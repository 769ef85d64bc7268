"""saved_bytes -- measure the memory that a call saves for its backward."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


def saved_bytes(fn: Callable[..., Any], *args: Any, parameters: Iterable[Tensor] = (), **kwargs: Any) -> int:
    """Run `fn` and return the bytes that autograd saves for its backward, of an eager or a fused function.

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

    Used by `saved_bytes` and, with fake tensors, by `configs.model_costs`.
    """
    excluded = {_storage(tensor) for tensor in exempt}
    saved: dict[int, int] = {}
    alive: list[Tensor] = []  # so that no address is reused while we count

    def pack(tensor: Tensor) -> Tensor:
        alive.append(tensor.detach())
        saved[_storage(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call()
    return sum(size for storage, size in saved.items() if storage not in excluded)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
