"""shards -- the position of a tensor in the tensor it was cut from. Dropout's mask then does not depend on the cut.

Tensor, sequence and data parallelism give each process a block of a tensor. With its `Shard` and a common seed, each
process computes its block of the mask of the whole tensor.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Shard", "check_shard", "first_column", "locate", "positions", "row_indices"]


@dataclass(frozen=True)
class Shard:
    """A block of a larger tensor.

    Args:
        start: the first index of the block in each dimension of the whole tensor.
        shape: the shape of the whole tensor.

    Raises:
        ValueError: start and shape are empty or differ in length, or the block begins outside of the whole tensor.
        TypeError: a number is not an integer.

    >>> Shard(start=(0, 512, 0), shape=(8, 1024, 768))  # the second half of the tokens
    Shard(start=(0, 512, 0), shape=(8, 1024, 768))
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        start, shape = list(self.start), list(self.shape)
        if not all(isinstance(number, int | torch.SymInt) for number in (*start, *shape)):
            raise TypeError(f"a shard's start and shape must be whole numbers, got {start} and {shape}")
        object.__setattr__(self, "start", tuple(start))
        object.__setattr__(self, "shape", tuple(shape))
        if len(start) != len(shape) or not shape:
            raise ValueError(f"a shard needs a start and a size for each dimension, got {start} and {shape}")
        if not all(0 <= first <= size for first, size in zip(start, shape, strict=True)):
            raise ValueError(f"a shard must start inside the whole {shape}, got {start}")


def check_shard(shard: Shard | None, shape: Sequence[int], *, whole_rows: bool = False) -> None:
    """Raise unless a tensor of `shape` fits into `shard`. Used by every op with dropout.

    Args:
        shard: None for a whole tensor.
        shape: the shape of the local tensor.
        whole_rows: True for an op that needs whole rows.

    Raises:
        TypeError: `shard` is not a Shard.
        ValueError: the tensor does not fit.
    """
    if shard is None:
        return
    if not isinstance(shard, Shard):
        raise TypeError(f"shard must be a fuselayers.ops.Shard or None, got {type(shard).__name__}")
    fits = len(shape) == len(shard.shape) and all(
        start + size <= whole for start, size, whole in zip(shard.start, shape, shard.shape, strict=True)
    )
    if not fits:
        raise ValueError(
            f"a tensor {list(shape)} that starts at {list(shard.start)} does not fit in the whole {list(shard.shape)}"
        )
    if whole_rows and shape[-1] != shard.shape[-1]:
        raise ValueError(f"a norm needs whole rows of {shard.shape[-1]}, got a shard with {shape[-1]} columns")


def positions(start: int, size: int, *, device: torch.device) -> Tensor:
    """Return start .. start + size - 1, int64 [size]. Used for the rows and columns of masks."""
    # Note: [64 bits on a GPU] Inductor turns `arange * constant` into an index expression, which it computes in 32 bits
    # on a GPU: the product overflows silently, and a large constant does not compile
    # (https://github.com/pytorch/pytorch/issues/175966). It does not look through `&`.
    return (torch.arange(size, device=device) & ((1 << 63) - 1)) + start


def first_column(shard: Shard | None) -> int:
    """Return the first column of the shard in the whole tensor."""
    return 0 if shard is None else shard.start[-1]


def row_indices(shard: Shard | None, shape: Sequence[int], *, device: torch.device) -> Tensor | None:
    """Return the index of each row of a tensor of `shape` in the whole tensor: int64 [R], rows flattened.

    For a whole tensor it is None, which the kernels read as 0..R-1.

    >>> row_indices(Shard((0, 1, 0), (2, 4, 8)), (2, 2, 8), device=torch.device("cpu"))
    tensor([1, 2, 5, 6])
    """
    if shard is None:
        return None
    index = torch.zeros((), dtype=torch.int64, device=device)
    for start, size, whole in zip(shard.start[:-1], shape[:-1], shard.shape[:-1], strict=True):
        index = index.unsqueeze(-1) * whole + positions(start, size, device=device)
    return index.reshape(-1)


def locate(shard: Shard, x: Tensor, *, dropping: bool) -> tuple[Tensor | None, int, str | None]:
    """Return `row_indices`, `first_column`, and why the kernels cannot take the call (None if they can).

    Args:
        shard: the shard of the call.
        x: the input of the dropout.
        dropping: False for a call without dropout, which only checks the shard.

    Raises:
        TypeError, ValueError: as `check_shard`.
    """
    check_shard(shard, x.shape)
    if not dropping:
        return None, 0, None
    column = shard.start[-1]
    reason = f"its shard begins at column {column}, which is not a multiple of 8" if column % 8 else None
    return row_indices(shard, x.shape, device=x.device), column, reason
