"""Random compositions of ops, for the tests of `fuse` as a whole."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["SIZES", "generated", "inputs_of"]

Step = Callable[[Tensor, Tensor, Tensor], Tensor]

# Each step takes a and b, both [R, C], and v, [C], and returns [R, C] of magnitude about 1. All steps are continuous,
# so that a rounding error stays small.
POINTWISE: tuple[Step, ...] = (
    lambda a, b, v: a.tanh(),
    lambda a, b, v: a.sin() * b.cos(),
    lambda a, b, v: F.gelu(a + v),
    lambda a, b, v: F.silu(a) * b.tanh(),
    lambda a, b, v: (-a * a).exp() + b,
    lambda a, b, v: a / (1 + b * b),
    lambda a, b, v: torch.where(a > b, a, b),
    lambda a, b, v: torch.maximum(a, b * 0.5) - v,
    lambda a, b, v: F.softplus(a - 0.5 * b),
    lambda a, b, v: a.clamp(-1.5, 1.5) * v.sigmoid(),
    lambda a, b, v: torch.atan(a).abs() * (b * b + 1).rsqrt(),
    lambda a, b, v: torch.erf(a) + 1 / (2 + b.sin()),
)
REDUCTIONS: tuple[Step, ...] = (
    lambda a, b, v: a - a.mean(-1, keepdim=True),
    lambda a, b, v: a - a.amax(0),
    lambda a, b, v: a.softmax(-1) * 3 + b,
    lambda a, b, v: a.log_softmax(0) * 0.2,
    lambda a, b, v: F.layer_norm(a, a.shape[-1:], v, eps=0.1),
    lambda a, b, v: a * (a.square().mean(-1, keepdim=True) + 0.1).rsqrt(),
    lambda a, b, v: b + (a * v).sum(-1, keepdim=True).tanh(),
    lambda a, b, v: a + (a.var(0, correction=0) + 0.1).sqrt().tanh(),
)
SHAPES: tuple[Step, ...] = (
    lambda a, b, v: (a.t() * b.t()).tanh().t(),
    lambda a, b, v: a.reshape(-1).sin().view(a.shape) + v,
    lambda a, b, v: torch.cat([a, b], 1).tanh()[:, : a.shape[1]],
    lambda a, b, v: (a.unsqueeze(1).expand(-1, 3, -1) * torch.stack([a, b, a], 1)).mean(1).tanh(),
    lambda a, b, v: a[:, :1] * b,
    lambda a, b, v: (a.view(1, *a.shape) + b[None]).squeeze(0).sin(),
    lambda a, b, v: a.t().contiguous().cos().t() * v[None, :],
)
SIZES = ((7, 129), (1, 7), (129, 7), (7, 1), (1, 1), (129, 129))


def generated(number: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    choice = random.Random(number)
    kinds = [POINTWISE, POINTWISE, REDUCTIONS, SHAPES]
    steps = [choice.choice(kind) for kind in choice.sample(kinds, k=3)]

    def fn(a: Tensor, b: Tensor, v: Tensor) -> Tensor:
        kept = b
        for number, step in enumerate(steps):
            a, b = step(a, b, v), (a if number % 2 else b)
        return a * v + b * kept

    return fn


def inputs_of(rows: int, columns: int) -> list[Tensor]:
    return [torch.randn(shape, requires_grad=True) for shape in ((rows, columns), (rows, columns), (columns,))]
