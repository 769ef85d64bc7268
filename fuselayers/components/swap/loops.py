"""Find a forward that loops over the elements of an input, such as the scan of a Mamba. `verify` uses it for blocks.

A compiler unrolls such a loop: a Mamba of 32 tokens takes over a minute, and each other length takes as long again.
"""

import collections
import functools
import sys
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..._torch.dispatch import forked_rng, tree_map_only
from ...partition.inspect.saved_bytes import tensors_of
from .batch import Call

_SHORTEST: Final = 8
"""The number of turns from which a loop counts: to unroll a shorter one takes little time."""


class _Calls(TorchFunctionMode):
    """Counts the calls of torch's functions by the lines of code, callers included."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[tuple[tuple[CodeType, int], ...]] = collections.Counter()

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        lines, frame = [], sys._getframe(1)
        while frame is not None and frame.f_code is not _counts.__code__:
            lines.append((frame.f_code, frame.f_lasti))
            frame = frame.f_back  # type: ignore[assignment]
        self.counts[tuple(lines)] += 1
        return function(*args, **(kwargs or {}))


def looped_size(module: nn.Module, call: Call) -> int | None:
    """Return the size of the inputs whose elements forward loops over, or None.

    Forward runs again with one element less in all dimensions of a size. It loops over them if that changes how often
    a line runs.
    """
    counts = _counts(module, call)
    for size in sorted({size for tensor in tensors_of(call) for size in tensor.shape if size >= _SHORTEST}):
        shorter = _counts(module, tree_map_only(Tensor, functools.partial(_shorter, size), call))
        if shorter and any(count >= _SHORTEST and shorter[lines] != count for lines, count in counts.items()):
            return size
    return None


def _counts(module: nn.Module, call: Call) -> Mapping[Any, int]:
    """Return how often forward calls torch from each line; nothing if it does not run on these inputs."""
    args, kwargs = tree_map_only(Tensor, Tensor.clone, call)  # autograd allows no write into a leaf
    try:
        with torch.enable_grad(), forked_rng(), _Calls() as calls:
            module(*args, **kwargs)
    except Exception:
        return {}
    counts: Mapping[Any, int] = calls.counts
    return counts


def _shorter(size: int, tensor: Tensor) -> Tensor:
    for dimension, own in enumerate(tensor.shape):
        if own == size:
            tensor = tensor.narrow(dimension, 0, size - 1)
    return tensor
