"""How a layer calls an op: directly, or through the fusion core. Used by every layer with a `backend`."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Final

from torch import Tensor

from .._torch.dispatch import is_compiling
from ..ops.implementations import uses_kernels
from ..partition import fuse, is_fusion_disabled

# The arguments of ops that are not tensors.
_STATIC: Final = ("activation", "eps", "p", "style", "training")


def op_for(op: Callable[..., Any], *tensors: Tensor | None, backend: str | None, partition: str) -> Callable[..., Any]:
    """Return `op` itself when `backend` is None or within `partition.disable_fusion`, else `op` fused for that backend.

    Layers store the two names and call this in each forward, so that they can be pickled and deep-copied. All layers
    share one fused function per op, backend and partition.

    On a GPU "auto" is `op` itself too where kernels take the tensors: they save next to nothing beside their inputs,
    and what `fuse` traces is the formula. With a budget the op is fused.

    Args:
        op: a function of this library.
        tensors: all tensors of the call; none where only the names are checked.
        backend: as for `fuse`, or None.
        partition: as for `fuse`.

    Raises:
        ValueError: there is no such backend or partition.

    >>> from fuselayers.ops import dropout
    >>> op_for(dropout, backend=None, partition="min_cut") is dropout
    True
    """
    # A compiler that traces the layer fuses the op with its neighbours.
    if backend is None or is_compiling() or is_fusion_disabled():
        return op
    if backend == "auto" and partition in ("default", "min_cut") and tensors and uses_kernels(backend, *tensors):
        return op
    return _fused(op, backend, partition)


@functools.cache
def _fused(op: Callable[..., Any], backend: str, partition: str) -> Callable[..., Any]:
    taken = inspect.signature(op).parameters
    static = tuple(name for name in _STATIC if name in taken)
    return fuse(op, backend=backend, partition=partition, static_argnames=static)
