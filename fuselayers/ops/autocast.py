"""Arithmetic without autocast. Used by the ops and the layers whose sums or logits need float32."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which products of tensors on x's device keep their dtypes.

    >>> x = torch.ones(2, 2)
    >>> with torch.autocast("cpu", torch.bfloat16), without_autocast(x):
    ...     (x @ x).dtype
    torch.float32
    """
    # The meta device has no autocast.
    return torch.autocast("cpu" if x.is_meta else x.device.type, enabled=False)
