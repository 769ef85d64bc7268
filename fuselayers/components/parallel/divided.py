"""divided -- the layout of a process that computes one part of a divided model.

x   [B, T, D]   B batch, T tokens, D model
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ...ops import Shard
from ..layout import Layout
from .collectives import Group, gathered, once, scattered, summed, total


@dataclass(frozen=True)
class Divided(Layout):
    """The layout of one process of a tensor-parallel group; see Note: [gradients are partial].

    Args:
        group: the processes.
        sequence: whether each process has only a part of the stream's tokens, or all of them.

    >>> import torch
    >>> layout = Divided(Group("0", rank=1, size=2), sequence=True)
    >>> layout.shard(torch.ones(3, 4), -1)
    Shard(start=(0, 4), shape=(3, 8))
    >>> layout.own(torch.arange(7), 0)
    tensor([4, 5, 6])
    """

    group: Group
    sequence: bool
    divided = True

    def shard(self, x: Tensor, dim: int) -> Shard | None:
        start, shape = [0] * x.dim(), list(x.shape)
        start[dim] = self.group.rank * shape[dim]
        shape[dim] *= self.group.size
        return Shard(tuple(start), tuple(shape))

    def own(self, x: Tensor, dim: int) -> Tensor:
        first, length = self.group.part(x.shape[dim])
        return x.narrow(dim, first, length)

    def split_tokens(self, x_BTD: Tensor) -> tuple[Tensor, Shard | None]:
        if not self.sequence:
            return x_BTD, None
        first, _ = self.group.part(x_BTD.shape[1])
        # Contiguous, so that the other tokens' memory is freed.
        return self.own(x_BTD, 1).contiguous(), Shard((0, first, 0), tuple(x_BTD.shape))

    def join_tokens(self, x_BTD: Tensor, shard: Shard | None) -> Tensor:
        return x_BTD if shard is None else gathered(x_BTD, 1, shard.shape[1], self.group)

    def around(self, sublayer: Callable[[Tensor], Tensor], shard: Shard | None) -> Callable[[Tensor], Tensor]:
        return functools.partial(self._around, sublayer, shard)

    def _around(self, sublayer: Callable[[Tensor], Tensor], shard: Shard | None, x_BTD: Tensor) -> Tensor:
        if shard is None:
            return summed(sublayer(x_BTD), self.group)
        return scattered(sublayer(self.join_tokens(x_BTD, shard)), 1, self.group)

    def total(self, x: Tensor) -> Tensor:
        return total(x, self.group)

    def once(self, x: Tensor) -> Tensor:
        return once(x, self.group)
