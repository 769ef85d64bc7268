"""What the ranks of the default process group must know of each other; without a group, of this process alone."""

from typing import TypeVar

import torch.distributed as dist

Value = TypeVar("Value")


def default_group() -> dist.ProcessGroup | None:
    """The default process group; None where this process is alone."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def rank_and_size() -> tuple[int, int]:
    """This process's rank in the group, and how many there are.

    >>> rank_and_size()
    (0, 1)
    """
    return (0, 1) if default_group() is None else (dist.get_rank(), dist.get_world_size())


def first_of(value: Value | None) -> Value | None:
    """The value of the lowest rank that has one, on every rank.

    >>> first_of(None) is None
    True
    """
    if default_group() is None:
        return value
    values: list[Value | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return next((one for one in values if one is not None), None)
