"""Find a forward that loops over the elements of an input, such as the scan of a Mamba. `verify` uses it for blocks.

A compiler unrolls such a loop: a Mamba of 32 tokens takes over a minute, and each other length takes as long again.
"""

import collections
import sys
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any, Final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..._torch.dispatch import forked_rng
from ...partition.inspect.saved_bytes import tensors_of
from .batch import Call

_SHORTEST: Final = 8
"""The number of turns from which a loop counts: shorter ones often go over something else, such as experts."""


class _Calls(TorchFunctionMode):
    """Counts the calls of torch's functions by their places in the code, callers included."""

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
        place, frame = [], sys._getframe(1)
        while frame is not None:
            place.append((frame.f_code, frame.f_lasti))
            frame = frame.f_back  # type: ignore[assignment]
        self.counts[tuple(place)] += 1
        return function(*args, **(kwargs or {}))


def looped_size(module: nn.Module, call: Call) -> int | None:
    """Return the size of an input's dimension, the first one aside, that forward loops over, or None."""
    args, kwargs = call
    with torch.no_grad(), forked_rng(), _Calls() as calls:
        module(*args, **kwargs)
    sizes = {size for tensor in tensors_of(call) for size in tensor.shape[1:] if size >= _SHORTEST}
    return next((count for count in calls.counts.values() if count in sizes), None)
