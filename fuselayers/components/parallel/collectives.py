"""Collectives that autograd can differentiate, over the processes of a tensor-parallel group.

Note: [gradients are partial] Outside of the divided layers every process backpropagates the loss of its own tokens. So
a gradient of the residual stream, and of a parameter that all processes hold, is a term: the sum over the group is the
gradient of the whole loss. A divided layer needs the whole gradient of its output, so the sum that ends its forward has
a sum as its backward, and its input needs no collective at all.

An uneven dimension is cut as `torch.chunk` does and as `DTensor` does: ceil(size / n) each, the last ones less or
nothing. Collectives need equal parts, so shorter ones are padded.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._torch.collectives import all_gather, all_reduce, all_to_all, reduce_scatter


@dataclass(frozen=True)
class Group:
    """A group of processes, as one of them sees it.

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
        each = -(-whole // self.size)
        first = min(rank * each, whole)
        return first, min(first + each, whole) - first


def summed(x: Tensor, group: Group) -> Tensor:
    """Return the sum of x over the group; backward sums the gradients too."""
    y: Tensor = _Sum.apply(x, group)  # type: ignore[no-untyped-call]
    return y


def total(x: Tensor, group: Group) -> Tensor:
    """Return the sum of x over the group; the gradient goes to this process's term alone."""
    y: Tensor = _Total.apply(x, group)  # type: ignore[no-untyped-call]
    return y


def of_all(x: Tensor, group: Group) -> Tensor:
    """Return x, which all processes hold; backward sums their gradients."""
    y: Tensor = _OfAll.apply(x, group)  # type: ignore[no-untyped-call]
    return y


def once(x: Tensor, group: Group) -> Tensor:
    """Return x, which all processes compute; backward divides the gradient by their number."""
    y: Tensor = _Once.apply(x, group)  # type: ignore[no-untyped-call]
    return y


def gathered(x: Tensor, dim: int, whole: int, group: Group) -> Tensor:
    """Return the parts of all processes, joined along `dim` to `whole`; backward returns the sum's own part."""
    y: Tensor = _Gather.apply(x, dim, whole, group)  # type: ignore[no-untyped-call]
    return y


def scattered(x: Tensor, dim: int, group: Group) -> Tensor:
    """Return this process's part along `dim` of the sum of x over the group; backward joins the parts' gradients."""
    y: Tensor = _Scatter.apply(x, dim, group)  # type: ignore[no-untyped-call]
    return y


def exchanged(x: Tensor, sizes: tuple[int, ...], group: Group) -> Tensor:
    """Return this process's part of each of several tensors that are packed along the first dimension.

    Args:
        x: this process's part of the packed tensor, cut as if it were one.
        sizes: of the packed tensors along that dimension, multiples of the group's size.
        group: the processes.
    """
    y: Tensor = _Exchange.apply(x, sizes, group)  # type: ignore[no-untyped-call]
    return y


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_reduce(x, group.name)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return all_reduce(dy, ctx.group.name), None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return all_reduce(x, group.name)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


class _OfAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return all_reduce(dy, ctx.group.name), None


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.size = group.size
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy / ctx.size, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, whole: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _gather(x, dim, whole, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        return _scatter(dy, ctx.dim, ctx.group), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.whole, ctx.group = dim, x.shape[dim], group
        return _scatter(x, dim, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return _gather(dy, ctx.dim, ctx.whole, ctx.group), None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: tuple[int, ...], group: Group) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        pieces = _pieces(sizes, group)
        sent = torch.cat([x[first : first + length] for first, length, _ in pieces])
        return all_to_all(sent, *_traffic(sizes, group), group.name)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        pieces = _pieces(ctx.sizes, ctx.group)
        sent, received = _traffic(ctx.sizes, ctx.group)
        back = torch.split(all_to_all(dy, received, sent, ctx.group.name), [length for _, length, _ in pieces])
        # They arrive in the order of `pieces`, and belong in the order of the rows.
        order = sorted(range(len(pieces)), key=lambda piece: pieces[piece][0])
        return torch.cat([back[piece] for piece in order]), None, None


def _gather(x: Tensor, dim: int, whole: int, group: Group) -> Tensor:
    each = -(-whole // group.size)
    x = _padded(x.movedim(dim, 0), each)
    return all_gather(x, group.size, group.name)[:whole].movedim(0, dim).contiguous()


def _scatter(x: Tensor, dim: int, group: Group) -> Tensor:
    whole = x.shape[dim]
    _, length = group.part(whole)
    x = _padded(x.movedim(dim, 0), -(-whole // group.size) * group.size)
    return reduce_scatter(x, group.size, group.name)[:length].movedim(0, dim).contiguous()


def _padded(x: Tensor, size: int) -> Tensor:
    missing = size - x.shape[0]
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) if missing else x


def _pieces(sizes: tuple[int, ...], group: Group) -> list[tuple[int, int, int]]:
    """Return what this process sends, in order: first row in its part, number of rows, and the receiver."""
    return _pieces_of(group.rank, sizes, group)


def _pieces_of(sender: int, sizes: tuple[int, ...], group: Group) -> list[tuple[int, int, int]]:
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
    """Return how many rows this process sends to each one, and receives of each one."""

    def rows(sender: int, receiver: int) -> int:
        return sum(length for _, length, to in _pieces_of(sender, sizes, group) if to == receiver)

    others = range(group.size)
    return [rows(group.rank, other) for other in others], [rows(other, group.rank) for other in others]
