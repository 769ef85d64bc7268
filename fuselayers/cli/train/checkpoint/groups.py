"""What the ranks of a process group must know of each other; without a group, of this process alone."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

Value = TypeVar("Value")


def group_or_default(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """This group, else the default one, else None: this process is alone."""
    if group is None and dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    return group


def rank_and_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This process's rank in the group, and how many there are.

    >>> rank_and_size(None)
    (0, 1)
    """
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def first_of(value: Value | None, group: dist.ProcessGroup | None) -> Value | None:
    """The value of the lowest rank that has one, on every rank.

    >>> first_of(None, None) is None
    True
    """
    if group is None:
        return value
    values: list[Value | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return next((one for one in values if one is not None), None)


def from_first(make: Callable[[], Value], group: dist.ProcessGroup | None) -> Value | None:
    """What rank 0 makes, on every rank.

    >>> from_first(lambda: 3, None)
    3
    """
    return first_of(make() if rank_and_size(group)[0] == 0 else None, group)
