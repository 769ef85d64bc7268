"""dropout -- y = x * keep(seed) * scale, with nothing but a seed kept for backward.

    x, y       [..., N]   any float dtype
    seed       []         int64

    forward    y  = x  * keep * scale
    backward   dx = dy * keep * scale          keep is computed again from the seed (see philox)

The product is made in float32 at least, and rounded to x's dtype once. p is rounded to a multiple of 1/65536.

Saved for backward: the seed, 8 bytes, whatever the size of x; of a shard also the numbers of its rows, 8 bytes for
each. torch's own dropout saves a mask of one byte per element.
Under plain `torch.compile`, torch's partitioner may still choose to keep a mask of one byte per element: where a later
op needs y, it weighs keeping y against making y again. `fuselayers.partition.fuse` never keeps one. In eager mode the
mask is made in memory of its own, forward and backward; a compiler makes it in the kernel that uses it, on a CPU from
random words that were written before.

Floor, in elements of x: 2, forward and backward; the kernel moves that.

It is linear in x: in eager mode it may be differentiated any number of times, in either direction, under `torch.vmap`
too. What is compiled may be differentiated once; torch raises at the second time.
"""

from typing import Any

import torch
from torch import Tensor

from .._torch.dispatch import apply_plainly, is_compiling, is_of_a_transform, transforms_are_active
from .forms import Replays, apply, define, needs_grad, run
from .forms.launch import kernel, launch
from .forms.triton_language import tl
from .philox import keep_bytes, keep_scale, keep_threshold, keep_tile, seed_for, seed_that_drops
from .rows import as_rows, cdiv, tile, vector_of
from .shapes import check_floating
from .shards import Shard, check_shard, first_column, obstacle, rows_of

__all__ = ["dropout", "dropout_from", "dropout_reference", "dropped"]


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
        p: probability of dropping an element, 0 <= p < 1. At 0 x itself is returned.
        training: False returns x itself.
        seed: int64 tensor of shape [] on x's device; drawn from torch's default generator when None.
        shard: where x lies in a larger tensor whose mask it shall have its part of; None if x is whole.
        backend: which form serves, see `forms`.

    Raises:
        ValueError: p is outside [0, 1), the seed has another shape, dtype or device, x does not fit the shard, or the
            backend is unknown.
        TypeError: x is not floating, the seed is not a tensor, p is one, or the shard is no shard.
        RuntimeError: without a seed, inside a `torch.vmap` whose `randomness` is "error", which is its default; or the
            backend that was asked for cannot take the call.

    >>> dropout(torch.ones(2, 8), 0.5, seed=torch.tensor(7))
    tensor([[0., 2., 2., 2., 2., 0., 2., 0.],
            [2., 0., 2., 0., 2., 2., 0., 2.]])
    """
    seed = seed_for(x, p, training=training, seed=seed)
    y: Tensor = _call((x, seed), (p, training, shard, backend))
    return y


def _dropout(x: Tensor, seed: Tensor | None, p: float, training: bool, shard: Shard | None, backend: str) -> Tensor:
    check_floating("x", x)
    seed = seed_that_drops(seed, p, training=training, device=x.device)
    check_shard(shard, x.shape)
    if seed is None:
        return x
    tensors, options = (x, seed, rows_of(shard, x)), (first_column(shard), p)
    y: Tensor = run(backend, dropout_from, _fused, tensors, options, obstacle=obstacle(shard))
    return y


_call = Replays(_dropout)


def dropout_from(x: Tensor, seed: Tensor, row_R: Tensor | None, first_column: int, p: float) -> Tensor:
    """Dropout's formula, of a place in a larger tensor. Used by the formulas of all ops that drop."""
    # Note: [two forms] Dynamo refuses a function that brings its own jvp, and needs none: it differentiates what it
    # traced. Everywhere else the one with all rules is used.
    y: Tensor
    if is_compiling():
        y = _TracedDropout.apply(x, seed, row_R, first_column, p)  # type: ignore[no-untyped-call]
    elif transforms_are_active() or is_of_a_transform(x) or is_of_a_transform(seed):
        y = _SeededDropout.apply(x, seed, row_R, first_column, p)  # type: ignore[no-untyped-call]
    elif needs_grad(x):
        y = _apply_seeded(x, seed, row_R, first_column, p)
    else:
        y = _dropped(x, seed, row_R, first_column, p)
    return y


def _fused(x: Tensor, seed: Tensor, row_R: Tensor | None, first_column: int, p: float) -> Tensor:
    arguments = x, seed, row_R, first_column, p
    y: Tensor = apply(_FusedDropout, *arguments) if needs_grad(x) else dropped(*arguments)
    return y


def dropout_reference(x: Tensor, p: float, *, seed: Tensor, shard: Shard | None = None) -> Tensor:
    """What dropout means, in plain torch: the truth every other form is held to."""
    return _dropped(x, seed, rows_of(shard, x), first_column(shard), p)


def _dropped(
    x: Tensor, seed: Tensor, row_R: Tensor | None, first_column: int, p: float, *, again: bool = False
) -> Tensor:
    # The scale in bfloat16 would be off by up to 0.4 %, and the mean of every dropped tensor with it.
    wide = torch.promote_types(x.dtype, torch.float32)
    factor = keep_bytes(seed, x.shape, row_R, first_column, p=p, again=again).to(wide) * keep_scale(p)
    y = x.to(wide) * factor
    # Note: [no cast that does nothing] Where an autograd function ends in one, Dynamo of torch 2.11 loses the incoming
    # gradient without a word, and every gradient before it is zero.
    return y if x.dtype == wide else y.to(x.dtype)


class _SeededDropout(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, seed: Tensor, row_R: Tensor | None, first_column: int, p: float) -> Tensor:
        return _dropped(x, seed, row_R, first_column, p)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, seed, row_R, *ctx.place = inputs
        ctx.save_for_backward(seed, row_R)
        ctx.save_for_forward(seed, row_R)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx = dropout_from(dy, *ctx.saved_tensors, *ctx.place)
        return dx, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, x_tangent: Tensor, *_: None) -> Tensor:
        return dropout_from(x_tangent, *ctx.saved_tensors, *ctx.place)


# For a function with a rule for each transform torch looks at the signature of its forward, at each call, to fill in
# defaults, of which there are none here. What else it does before this is for tensors of transforms.
_apply_seeded = apply_plainly(_SeededDropout)


class _TracedDropout(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, seed: Tensor, row_R: Tensor | None, first_column: int, p: float) -> Tensor:
        return _dropped(x, seed, row_R, first_column, p)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, seed, row_R, ctx.first_column, ctx.p = inputs
        ctx.save_for_backward(seed, row_R)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        seed, row_R = ctx.saved_tensors
        return _dropped(dy, seed, row_R, ctx.first_column, ctx.p, again=True), None, None, None, None


class _FusedDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seed: Tensor, row_R: Tensor | None, first_column: int, p: float) -> Tensor:
        ctx.save_for_backward(seed, row_R)
        ctx.place = first_column, p
        y: Tensor = dropped(x, seed, row_R, first_column, p)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return _fused(dy, *ctx.saved_tensors, *ctx.place), None, None, None, None


def _launch(x: Tensor, seed: Tensor, row_R: Tensor | None, first_column: int, p: float) -> Tensor:
    y = _like(x, seed, row_R, first_column, p)
    if not y.numel():
        return y
    x_RN = as_rows(x.reshape(1, 1) if not x.dim() else x)
    y_RN = y.view(x_RN.shape)
    vector = vector_of(x_RN, y_RN)
    block_rows, block_columns = tile(x_RN)
    launch(
        _dropout_kernel,
        (cdiv(x_RN.shape[0], block_rows), cdiv(x_RN.shape[1], block_columns)),
        (
            *(x_RN, y_RN, seed, row_R, first_column // 8),
            *(x_RN.shape[0], x_RN.shape[1] // vector, x_RN.stride(0) // vector),
            *(keep_threshold(p), keep_scale(p)),
        ),
        (vector, block_rows, block_columns),
    )
    return y


def _like(x: Tensor, seed: Tensor, row_R: Tensor | None, first_column: int, p: float) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@kernel
def _dropout_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    y_ptr,
    seed_ptr,
    row_numbers_ptr,
    first_group,
    num_rows,
    num_columns,
    x_stride,
    threshold,
    scale,
    VECTOR: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    first_column = tl.program_id(1) * BLOCK_COLUMNS
    columns = first_column + tl.arange(0, BLOCK_COLUMNS)
    live = (rows < num_rows)[:, None] & (columns < num_columns * VECTOR)[None, :]
    row = rows.to(tl.int64)[:, None]
    x = tl.load(x_ptr + row * x_stride * VECTOR + columns[None, :], mask=live, other=0.0).to(tl.float32)
    keep = keep_tile(
        seed_ptr, row_numbers_ptr, first_group, rows, num_rows, first_column, threshold, BLOCK_ROWS, BLOCK_COLUMNS
    )
    y = x * tl.where(keep, scale, 0.0)
    tl.store(y_ptr + row * (num_columns * VECTOR) + columns[None, :], y.to(y_ptr.dtype.element_ty), mask=live)


dropped = define(
    "dropout(Tensor x, Tensor seed, Tensor? row_numbers, int first_column, float p) -> Tensor",
    _launch,
    _like,
    formula=_dropped,
)
