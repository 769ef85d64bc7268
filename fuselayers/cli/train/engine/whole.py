"""Whole tensors of split ones, and back. Every process calls these."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def whole(value: Any) -> Any:
    """The whole of each DTensor in a state_dict, which other values leave as they are."""
    if isinstance(value, dict):
        return {key: whole(entry) for key, entry in value.items()}
    return value.full_tensor() if _is_split(value) else value


def like(values: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """This process's parts of whole tensors, as the tensors of the same names are split."""
    return {name: _part(value, own.get(name)) for name, value in values.items()}


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor, which may be all of it."""
    return tensor.to_local() if _is_split(tensor) else tensor  # type: ignore[attr-defined]


def _part(value: Any, own: Any) -> Any:
    if not _is_split(own) or not isinstance(value, Tensor) or value.shape != own.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    # Every process has the whole and takes its part: nothing is sent.
    return distribute_tensor(value.to(own.device), own.device_mesh, own.placements, src_data_rank=None)


def _is_split(value: Any) -> bool:
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)
