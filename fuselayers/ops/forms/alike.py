"""alike -- which calls are like one that came before, and how many of them are known. Used by served and by replay."""

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from ..._torch.dispatch import has_storage, tensors_like

__all__ = ["MOST_ALIKE", "is_plain", "like_these", "put_first"]

MOST_ALIKE: Final = 8
"""Calls of one key are told apart one by one."""

# Keys of an op. What replay knows of a call takes 27 kB (layer_norm, with its backward).
_MOST_KEYS: Final = 512

_Key = tuple[Any, ...]
_Known = TypeVar("_Known")


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is one of numbers in memory, and torch's guards can be asked about it."""
    # Tensors of torch.func and of its older kin have the class of a plain one, and no storage; those on meta have one.
    in_memory = tensor.layout == torch.strided and has_storage(tensor) and not tensor.is_meta
    return tensor.__class__ in (Tensor, Parameter) and in_memory and not tensor.is_neg()


def like_these(tensors: Sequence[Tensor]) -> Callable[..., bool] | None:
    """Return what says whether as many tensors are like these; None if nothing can.

    Alike are class, dtype, device, sizes, strides, whether a gradient is needed, what torch dispatches on, and that
    each is another object: one tensor in two places may be two in the next call.
    """
    if not all(map(is_plain, tensors)):
        return None
    alike = tensors_like(*tensors)
    return alike if alike(*tensors) else None


def put_first(known: dict[_Key, tuple[_Known, ...]], key: _Key, one: _Known) -> None:
    """Put what is known of a call before what is known of others of its key; the oldest is forgotten at the limits."""
    if len(known) >= _MOST_KEYS and key not in known:
        del known[next(iter(known))]
    known[key] = (one, *known.get(key, ()))[:MOST_ALIKE]
