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

from torch import Tensor

from .draw import seed_or_draw
from .elementwise import dropout_formula, fused_dropout, masked
from .implementations import Op
from .shapes import check_floating
from .shards import Shard, first_column, locate, row_indices

__all__ = ["dropout", "dropout_reference"]


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

    >>> import torch
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


def dropout_reference(x: Tensor, p: float, *, seed: Tensor, shard: Shard | None = None) -> Tensor:
    """The definition of dropout, in plain torch."""
    return masked(x, seed, row_indices(shard, x.shape, device=x.device), first_column(shard), p)


_op = Op("dropout", dropout_formula, fused_dropout)
