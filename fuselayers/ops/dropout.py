"""dropout -- y = x * keep(seed) * scale, in one pass, with nothing but a seed kept for backward.

    x, y       [..., N]   any float dtype
    seed       []         int64

    forward    y  = x  * keep * scale
    backward   dx = dy * keep * scale          keep is computed again from the seed (see philox)

Saved for backward: the seed, 8 bytes, whatever the size of x. torch's own dropout saves a mask of one byte per element.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .philox import check_probability, draw_seed, keep_mask, keep_scale

__all__ = ["dropout", "dropout_reference"]


def dropout(x: Tensor, p: float, *, training: bool = True, seed: Tensor | None = None) -> Tensor:
    """Zero elements of x with probability p and scale the others by 1 / (1 - p).

    Args:
        x: [..., N], any float dtype.
        p: probability of dropping an element, 0 <= p < 1. At 0 x itself is returned.
        training: False returns x itself.
        seed: int64 tensor of shape [] on x's device; drawn from torch's default generator when None.

    Raises:
        ValueError: p is outside [0, 1), or the seed has another shape or dtype.

    >>> dropout(torch.ones(2, 8), 0.5, seed=torch.tensor(7))
    tensor([[0., 2., 2., 2., 2., 0., 2., 0.],
            [2., 0., 2., 0., 2., 2., 0., 2.]])
    """
    check_probability(p)
    if not training or p == 0:
        return x
    if seed is None:
        seed = draw_seed(device=x.device)
    # Note: [two forms] A compiler sees the formula and decides by itself that the mask is cheaper to make again
    # than to keep. In eager mode autograd would keep it, so there the op brings its own backward.
    if torch.compiler.is_compiling():
        return dropout_reference(x, p, seed=seed)
    dropped: Tensor = _SeededDropout.apply(x, seed, p)  # type: ignore[no-untyped-call]
    return dropped


def dropout_reference(x: Tensor, p: float, *, seed: Tensor) -> Tensor:
    """What dropout means, in plain torch: the truth every other form is held to."""
    # The scale in bfloat16 would be off by up to 0.4 %, and the mean of every dropped tensor with it.
    wide = torch.promote_types(x.dtype, torch.float32)
    factor = keep_mask(seed, x.shape, p=p).to(wide) * keep_scale(p)
    return (x.to(wide) * factor).to(x.dtype)


class _SeededDropout(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, seed: Tensor, p: float) -> Tensor:
        return dropout_reference(x, p, seed=seed)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
        _, seed, ctx.p = inputs
        ctx.save_for_backward(seed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (seed,) = ctx.saved_tensors
        return dropout_reference(dy, ctx.p, seed=seed), None, None
