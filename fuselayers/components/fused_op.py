"""How a layer calls an op: directly, or through the fusion core. Used by every layer with a `backend`."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn

from ..ops import check_probability
from ..partition import fuse
from .checks import check_positive

__all__ = ["BiasedOp", "op_for"]

# The arguments of ops that are neither tensors nor the seed, which is one.
_STATIC: Final = ("activation", "eps", "p", "style", "training")


def op_for(op: Callable[..., Any], *, backend: str | None, partition: str) -> Callable[..., Any]:
    """Return `op` itself when `backend` is None, else `op` fused for that backend.

    Layers keep the two names and ask again in each forward, so that they can be pickled and deep-copied; the fused
    function is made once per op, backend and partition, for all layers together.

    Raises:
        ValueError: there is no such backend or partition.

    >>> from fuselayers.ops import dropout
    >>> op_for(dropout, backend=None, partition="min_cut") is dropout
    True
    """
    # A compiler that is tracing the layer fuses the op with what stands around it; nothing is to be looked up there.
    if backend is None or torch.compiler.is_compiling():
        return op
    return _fused(op, backend, partition)


@functools.cache
def _fused(op: Callable[..., Any], backend: str, partition: str) -> Callable[..., Any]:
    taken = inspect.signature(op).parameters
    static = tuple(name for name in _STATIC if name in taken)
    return fuse(op, backend=backend, partition=partition, static_argnames=static)


class BiasedOp(nn.Module):
    """The base of the layers that are one op with a bias of their own: a parameter, so that it learns and is saved."""

    built_in: ClassVar[frozenset[str]] = frozenset({"backend", "partition"})

    def __init__(
        self, op: Callable[..., Any], *, p: float, bias_shape: int | None, backend: str | None, partition: str
    ) -> None:
        super().__init__()
        check_probability(p)
        if bias_shape is not None:
            check_positive("bias_shape", bias_shape)
        op_for(op, backend=backend, partition=partition)  # a misspelt name fails here, not in the first forward
        self.op = op
        self.p = p
        self.backend = backend
        self.partition = partition
        self.bias = nn.Parameter(torch.zeros(bias_shape)) if bias_shape is not None else None

    def _call(self, *tensors: Tensor, **arguments: Any) -> Any:
        op = op_for(self.op, backend=self.backend, partition=self.partition)
        return op(*tensors, bias=self.bias, p=self.p, training=self.training, **arguments)

    def extra_repr(self) -> str:
        bias_shape = None if self.bias is None else self.bias.numel()
        return f"p={self.p}, bias_shape={bias_shape}, backend={self.backend!r}, partition={self.partition!r}"
