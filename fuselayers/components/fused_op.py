"""How a layer calls an op: directly, or through the fusion core. Used by every layer with a `backend`."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Final

from .._torch.dispatch import is_compiling
from ..partition import fuse, partitioner
from ..partition.backends import check_backends

# The arguments of ops that are not tensors.
_STATIC: Final = ("activation", "eps", "p", "style", "training")


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
    share one fused function per op, backend and partition.

    >>> from fuselayers.ops import dropout
    >>> op_for(dropout, backend="auto", partition="min_cut") is dropout
    True
    """
    # A compiler that traces the layer fuses the op with its neighbours; it cannot trace `_fused`.
    return op if backend == "auto" or is_compiling() else _fused(op, backend, partition)


@functools.cache
def _fused(op: Callable[..., Any], backend: str, partition: str) -> Callable[..., Any]:
    taken = inspect.signature(op).parameters
    static = tuple(name for name in _STATIC if name in taken)
    return fuse(op, backend=backend, partition=partition, static_argnames=static)
