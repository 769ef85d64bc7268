"""Whole tensors of split ones. Every process calls this."""

from typing import Any

import torch


def whole(value: Any) -> Any:
    """The whole of each DTensor in a state_dict, which other values leave as they are."""
    if isinstance(value, dict):
        return {key: whole(entry) for key, entry in value.items()}
    return value.full_tensor() if _is_split(value) else value


def _is_split(value: Any) -> bool:
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)
