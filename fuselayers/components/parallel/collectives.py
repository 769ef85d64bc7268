"""Collectives that autograd can differentiate, over the processes of a tensor-parallel group.

Note: [gradients are partial] Outside the divided layers every process backpropagates the loss of its own tokens. So on
each process the gradient of the residual stream, or of a parameter that all processes hold, is only a term: the sum
over the group is the gradient of the whole loss. A divided layer needs the whole gradient of its output. So the sum
that ends its forward is also a sum in backward, and its input needs no collective.

An uneven dimension is cut as by `torch.chunk` and `DTensor`: ceil(size / n) each, and less or nothing for the last
parts. Collectives need equal parts, so shorter parts are padded.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._torch.collectives import all_gather, all_reduce, all_to_all, reduce_scatter


@dataclass(frozen=True)
class Group:
    """A group of processes, and the number of this process in it.

    Args:
        name: torch's name of the group.
        rank: the number of this process in it.
        size: the number of processes.
    """

    name: str
    rank: int
    size: int

    def part(self, whole: int, rank: int | None = None) -> tuple[int, int]:
        """Return the first index and the length of a process's part of a dimension; of this process by default.

        >>> Group("0", rank=1, size=2).part(7)
        (4, 3)
        """
        rank = self.rank if rank is None else rank
        length = -(-whole // self.size)
        first = min(rank * length, whole)
        return first, min(first + length, whole) - first


def summed(x: Tensor, group: Group) -> Tensor:
    """Return the sum of x over the group; backward sums the gradients too."""
    return _run(x, _sum, _sum, group)


def total(x: Tensor, group: Group) -> Tensor:
    """Return the sum of x over the group; the gradient goes to this process's term alone."""
    return _run(x, _sum, _as_it_is, group)


def of_all(x: Tensor, group: Group) -> Tensor:
    """Return x, which all processes hold; backward sums their gradients."""
    return _run(x, _same, _sum, group)


def once(x: Tensor, group: Group) -> Tensor:
    """Return x, which all processes compute; backward divides the gradient by their number."""
    return _run(x, _same, _share, group)


def gathered(x: Tensor, dim: int, whole: int, group: Group) -> Tensor:
    """Return the parts of all processes, joined along `dim` to `whole`; backward returns this part of the sum."""
    return _run(x, _gather, _scatter, group, dim, whole)


def scattered(x: Tensor, dim: int, group: Group) -> Tensor:
    """Return this process's part along `dim` of the sum of x over the group; backward joins the parts' gradients."""
    return _run(x, _scatter, _gather, group, dim, x.shape[dim])


def exchanged(x: Tensor, sizes: tuple[int, ...], group: Group) -> Tensor:
    """Return this process's part of each of several tensors that are packed along the first dimension.

    Args:
        x: this process's part of the packed tensor, cut as a single tensor.
        sizes: of the packed tensors along the first dimension, multiples of the group's size.
        group: the processes.
    """
    return _run(x, _exchange, _exchange_back, group, sizes)


class _Collective(torch.autograd.Function):
    """Applies one function to a tensor in forward, and another to its gradient in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Any, backward: Any, *more: Any) -> Tensor:
        ctx.backward_of, ctx.more = backward, more
        y: Tensor = forward(x, *more)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.backward_of(dy, *ctx.more), None, None, *(None for _ in ctx.more)


def _run(x: Tensor, forward: Callable[..., Tensor], backward: Callable[..., Tensor], *more: Any) -> Tensor:
    y: Tensor = _Collective.apply(x, forward, backward, *more)  # type: ignore[no-untyped-call]
    return y


def _sum(x: Tensor, group: Group) -> Tensor:
    return all_reduce(x, group.name)


def _same(x: Tensor, group: Group) -> Tensor:
    return x.view_as(x)


def _as_it_is(dy: Tensor, group: Group) -> Tensor:
    # Not a view: autograd could store it as this input's gradient, although others share its memory.
    return dy


def _share(x: Tensor, group: Group) -> Tensor:
    return x / group.size


def _exchange(x: Tensor, group: Group, sizes: tuple[int, ...]) -> Tensor:
    pieces = _pieces(sizes, group)
    sent = torch.cat([x[first : first + length] for first, length, _ in pieces])
    return all_to_all(sent, *_traffic(sizes, group), group.name)


def _exchange_back(dy: Tensor, group: Group, sizes: tuple[int, ...]) -> Tensor:
    pieces = _pieces(sizes, group)
    sent, received = _traffic(sizes, group)
    back = torch.split(all_to_all(dy, received, sent, group.name), [length for _, length, _ in pieces])
    # The pieces arrive in the order of `pieces`; they are joined in the order of the rows.
    order = sorted(range(len(pieces)), key=lambda piece: pieces[piece][0])
    return torch.cat([back[piece] for piece in order])


def _gather(x: Tensor, group: Group, dim: int, whole: int) -> Tensor:
    x = _padded(x.movedim(dim, 0), -(-whole // group.size))
    return all_gather(x, group.size, group.name)[:whole].movedim(0, dim).contiguous()


def _scatter(x: Tensor, group: Group, dim: int, whole: int) -> Tensor:
    _, length = group.part(whole)
    x = _padded(x.movedim(dim, 0), -(-whole // group.size) * group.size)
    return reduce_scatter(x, group.size, group.name)[:length].movedim(0, dim).contiguous()


def _padded(x: Tensor, size: int) -> Tensor:
    missing = size - x.shape[0]
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) if missing else x


def _pieces(sizes: tuple[int, ...], group: Group, sender: int | None = None) -> list[tuple[int, int, int]]:
    """Return the pieces a process sends, in order: first row in its part, number of rows, and receiver."""
    held, count = group.part(sum(sizes), sender)
    pieces = []
    for receiver in range(group.size):
        begin = 0
        for size in sizes:
            first, length = group.part(size, receiver)
            low, high = max(begin + first, held), min(begin + first + length, held + count)
            if low < high:
                pieces.append((low - held, high - low, receiver))
            begin += size
    return pieces


def _traffic(sizes: tuple[int, ...], group: Group) -> tuple[list[int], list[int]]:
    """Return how many rows this process sends to each process, and receives from each."""

    def rows(sender: int, receiver: int) -> int:
        return sum(length for _, length, to in _pieces(sizes, group, sender) if to == receiver)

    others = range(group.size)
    return [rows(group.rank, other) for other in others], [rows(other, group.rank) for other in others]
