"""collectives -- torch's functional collectives: they return new tensors, and compilers trace them.

The public collectives of `torch.distributed` write into their arguments. This file imports `torch.distributed`.
"""

import torch
import torch.distributed._functional_collectives  # defines the ops
from torch import Tensor


def all_reduce(x: Tensor, group: str) -> Tensor:
    """Return the sum of x over the processes of a group, given by its name."""
    return _arrived(torch.ops._c10d_functional.all_reduce(x.contiguous(), "sum", group))


def all_gather(x: Tensor, size: int, group: str) -> Tensor:
    """Return x of all `size` processes, joined along the first dimension."""
    return _arrived(torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), size, group))


def reduce_scatter(x: Tensor, size: int, group: str) -> Tensor:
    """Return this process's part, along the first dimension, of the sum of x over the `size` processes."""
    return _arrived(torch.ops._c10d_functional.reduce_scatter_tensor(x.contiguous(), "sum", size, group))


def all_to_all(x: Tensor, sent: list[int], received: list[int], group: str) -> Tensor:
    """Send `sent[p]` rows of x to process p, and return the rows of all processes, `received[p]` of process p."""
    return _arrived(torch.ops._c10d_functional.all_to_all_single(x.contiguous(), received, sent, group))


def _arrived(x: Tensor) -> Tensor:
    y: Tensor = torch.ops._c10d_functional.wait_tensor(x)
    return y
