"""How a layer calls an op: directly, or through the fusion core. Used by every layer with a `backend`."""

import functools
from collections.abc import Callable, Hashable
from typing import Any, Final

from .._torch.dispatch import is_compiling
from ..partition import fuse, partitioner
from ..partition.backends import check_backends

# The arguments of ops that are constants of a graph.
_CONSTANTS: Final = ("activation", "eps", "p", "style", "training")


def check_names(backend: str, partition: str, *, compress: str | None = None) -> None:
    """Raise unless `fuse` has these names. Layers call it when they are built, so that misspelt names fail early.

    Raises:
        ValueError: there is no such backend, partition or compression.
        TypeError: the backend is not a name, such as None.
    """
    check_backends(backend, ())
    partitioner(partition, compress=compress)


def op_for(op: Callable[..., Any], *, backend: str, partition: str) -> Callable[..., Any]:
    """Return `op` itself for the backend "auto", since an op chooses its kernel; else `op` through `fuse`.

    Layers store the two names and call this in each forward, so that they can be pickled and deep-copied. All layers
    share one fused function per op, backend, partition and constants.

    >>> from fuselayers.ops import dropout
    >>> op_for(dropout, backend="auto", partition="min_cut") is dropout
    True
    """
    # A compiler that traces the layer fuses the op with its neighbours; it cannot trace `_fused`.
    if backend == "auto" or is_compiling():
        return op
    return functools.partial(_call_fused, op, backend, partition)


def _call_fused(op: Callable[..., Any], backend: str, partition: str, *tensors: Any, **options: Any) -> Any:
    constants = {name: options.pop(name) for name in _CONSTANTS if name in options}
    if not all(isinstance(value, Hashable) for value in constants.values()):
        return op(*tensors, **constants, **options)  # it raises
    return _fused(op, backend, partition, **constants)(*tensors, **options)


@functools.lru_cache(maxsize=256)  # a schedule may change p at each step
def _fused(op: Callable[..., Any], backend: str, partition: str, **constants: Any) -> Callable[..., Any]:
    # Dynamo would make a symbol of a number that changes from call to call.
    return fuse(functools.partial(op, **constants), backend=backend, partition=partition)
