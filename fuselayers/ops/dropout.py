"""dropout -- y = x * keep(seed) * scale, with only a seed saved for backward.

    x, y       [..., N]   any float dtype
    seed       []         int64

    forward    y  = x  * keep * scale
    backward   dx = dy * keep * scale          keep is recomputed from the seed (see philox)

The product is computed in float32 at least and rounded once, to x's dtype. p is rounded to a multiple of 1/65536.

Saved for backward: the seed, 8 bytes for any size of x; for a shard also its row indices, 8 bytes each. torch's own
dropout saves a mask of one byte per element. Under plain `torch.compile`, torch's partitioner may still save a mask:
where a later op needs y, it weighs saving y against recomputing it. `fuselayers.partition.fuse` never saves a mask. In
eager mode and under a compiler the formula allocates a mask in forward and backward, of a byte per element on a GPU.

Bytes moved by the kernel, in elements of x: 2, forward and backward.

Dropout is linear in x: in eager mode it is differentiable any number of times, in either direction, and under
`torch.vmap`. A compiled dropout is differentiable once; torch raises at the second derivative.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._torch.dispatch import is_compiling, is_of_a_transform, jit_is_tracing, transforms_are_active
from .draw import seed_or_draw
from .elementwise import empty_elementwise, launch_elementwise
from .implementations import Op, backward_takes_formula, define, needs_grad
from .philox import keep_factors, keep_scale
from .shapes import check_floating
from .shards import Shard, first_column, locate, row_indices

__all__ = ["dropout", "dropout_formula", "dropout_op", "dropout_reference"]


def dropout(
    x: Tensor,
    p: float,
    *,
    training: bool = True,
    seed: Tensor | None = None,
    shard: Shard | None = None,
    backend: str = "auto",
) -> Tensor:
    """Zero elements of x with probability p and scale the others by 1 / (1 - p).

    Args:
        x: [..., N], any float dtype.
        p: probability of dropping an element, 0 <= p <= 1. At 0 x itself is returned.
        training: False returns x itself.
        seed: int64 tensor of shape [] on x's device; drawn from torch's default generator when None.
        shard: the position of x in a larger tensor, whose mask it uses; None if x is the whole tensor.
        backend: see `fuselayers.ops.implementations.dispatch`.

    Raises:
        ValueError: p is outside [0, 1], the seed has another shape, dtype or device, x does not fit the shard, or the
            backend is unknown.
        TypeError: x is not dense and floating, the seed is not a tensor, p is a tensor, or `shard` is not a Shard.
        RuntimeError: without a seed, inside a `torch.vmap` whose `randomness` is "error", which is its default; or the
            requested backend cannot take the call.

    >>> dropout(torch.ones(2, 8), 0.5, seed=torch.tensor(7))
    tensor([[0., 2., 2., 2., 2., 0., 2., 0.],
            [2., 0., 2., 0., 2., 2., 0., 2.]])
    """
    check_floating("x", x)
    seed = seed_or_draw(x, p, training=training, seed=seed)
    row_R, column, reason = (None, 0, None) if shard is None else locate(shard, x, dropping=seed is not None)
    if seed is None:
        return x
    y: Tensor = _op(backend, (x, seed, row_R), (column, p), unsupported_reason=reason)
    return y


def dropout_formula(x: Tensor, seed: Tensor, row_R: Tensor | None, first_column: int, p: float) -> Tensor:
    """Return the dropout of x at a position in a larger tensor. Used by the formulas of all ops with dropout."""
    # Note: [two functions] Transforms need a vmap rule and a jvp. Dynamo refuses an autograd function with a jvp, and
    # eager mode needs neither.
    if not is_compiling() and (transforms_are_active() or is_of_a_transform(x) or is_of_a_transform(seed)):
        y: Tensor = _SeededDropout.apply(x, seed, row_R, first_column, p)  # type: ignore[no-untyped-call]
        return y
    return _dropped(_masked, x, seed, row_R, first_column, p)


def _dropped(
    drop: Callable[..., Tensor], x: Tensor, seed: Tensor, row_R: Tensor | None, first_column: int, p: float
) -> Tensor:
    y: Tensor = (
        _Dropout.apply(drop, x, seed, row_R, first_column, p)  # type: ignore[no-untyped-call]
        if needs_grad(x) and not jit_is_tracing()  # a trace cannot record a function written in Python
        else drop(x, seed, row_R, first_column, p)
    )
    return y


def dropout_reference(x: Tensor, p: float, *, seed: Tensor, shard: Shard | None = None) -> Tensor:
    """The definition of dropout, in plain torch."""
    return _masked(x, seed, row_indices(shard, x.shape, device=x.device), first_column(shard), p)


def _masked(
    x: Tensor, seed: Tensor, row_R: Tensor | None, first_column: int, p: float, *, again: bool = False
) -> Tensor:
    # In bfloat16 the scale would be off by up to 0.4 %, and so would the mean of the result.
    wide = torch.promote_types(x.dtype, torch.float32)
    factor = keep_factors(seed, x.shape, row_R, first_column, p=p, again=again).to(wide) * keep_scale(p)
    y = x.to(wide) * factor
    # Note: [no cast that does nothing] If an autograd function ends in such a cast, Dynamo of torch 2.11 silently loses
    # the incoming gradient, and every gradient before it is zero.
    return y if x.dtype == wide else y.to(x.dtype)


class _SeededDropout(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, seed: Tensor, row_R: Tensor | None, first_column: int, p: float) -> Tensor:
        return _masked(x, seed, row_R, first_column, p)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, seed, row_R, *ctx.options = inputs
        ctx.save_for_backward(seed, row_R)
        ctx.save_for_forward(seed, row_R)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx = dropout_formula(dy, *ctx.saved_tensors, *ctx.options)
        return dx, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, x_tangent: Tensor, *_: None) -> Tensor:
        return dropout_formula(x_tangent, *ctx.saved_tensors, *ctx.options)


class _Dropout(torch.autograd.Function):
    """Dropout by `drop`, which is the formula or the op, in eager mode and under compilers.

    It has no `setup_context`: with `setup_context`, torch inspects the signature at each call, which takes 40 us.
    """

    @staticmethod
    def forward(
        ctx: Any,
        drop: Callable[..., Tensor],
        x: Tensor,
        seed: Tensor,
        row_R: Tensor | None,
        first_column: int,
        p: float,
    ) -> Tensor:
        ctx.save_for_backward(seed, row_R)
        ctx.drop, ctx.options = drop, (first_column, p)
        return drop(x, seed, row_R, first_column, p)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.drop is _masked and is_compiling():
            dx = _masked(dy, *ctx.saved_tensors, *ctx.options, again=True)
        else:
            drop = dropout_formula if ctx.drop is _masked or backward_takes_formula() else dropout_op
            dx = drop(dy, *ctx.saved_tensors, *ctx.options)
        return None, dx, None, None, None, None


def _launch(x: Tensor, seed: Tensor, row_R: Tensor | None, first_column: int, p: float) -> Tensor:
    return launch_elementwise(x, None, None, seed, row_R, first_column, None, p)


dropout_op = define(
    "dropout(Tensor x, Tensor seed, Tensor? row_indices, int first_column, float p) -> Tensor",
    _launch,
    lambda x, *_: empty_elementwise(x),
)
_op = Op("dropout", dropout_formula, partial(_dropped, dropout_op))
