"""bias_dropout_residual -- y = dropout(x + bias, p) + residual: a sublayer's output is added to the residual stream.

    x, residual, y   [..., N]   any float dtype
    bias             [N]        optional
    seed             []         int64

    forward    y         = (x + bias) * keep * scale + residual
    backward   dx        = dy * keep * scale
               dbias     = dx summed over every dimension but the last
               dresidual = dy

Saved for backward: a seed (see dropout, also for shards). Dtypes promote as in torch's own sums.

Bytes moved, in elements of x: 3 forward (read x and residual, write y), 2 backward (read dy, write dx; dresidual is dy
itself). Without dropout dx is dy too, and backward moves nothing, or 1 where torch sums dy for the bias. In addition,
each program of a kernel reads the bias and writes one float32 row for its gradient.
"""

from torch import Tensor

from .draw import seed_or_draw
from .dropout import dropout_reference
from .elementwise import elementwise_formula, fused_elementwise
from .implementations import Op
from .shapes import check_like, check_row_vector, check_rows
from .shards import Shard, locate

__all__ = ["bias_dropout_residual", "bias_dropout_residual_reference"]


def bias_dropout_residual(
    x: Tensor,
    residual: Tensor,
    *,
    bias: Tensor | None = None,
    p: float = 0.0,
    training: bool = True,
    seed: Tensor | None = None,
    shard: Shard | None = None,
    backend: str = "auto",
) -> Tensor:
    """Return dropout(x + bias, p) + residual.

    Args:
        x: [..., N], the sublayer's output, any float dtype.
        residual: [..., N], the residual stream.
        bias: [N], or None for no bias.
        p: dropout probability, 0 <= p <= 1.
        training: False drops nothing.
        seed: int64 tensor of shape [] on x's device, which fixes the mask; drawn from torch's generator when None.
        shard: the position of x in a larger tensor, whose mask it uses; None if x is the whole tensor.
        backend: see `fuselayers.ops.implementations.dispatch`.

    Raises:
        ValueError: x has no dimension, the residual, the bias, the seed or the shard does not fit it, p is outside
            [0, 1], or the backend is unknown.
        TypeError: a tensor is not dense and floating, the seed is not a tensor, p is a tensor, or `shard` is not a
            Shard.
        RuntimeError: without a seed, inside a `torch.vmap` whose `randomness` is "error", which is its default; or the
            requested backend cannot take the call.

    >>> import torch
    >>> bias_dropout_residual(torch.tensor([1.0, 2.0]), torch.tensor([10.0, 10.0]), bias=torch.tensor([0.5, 0.5]))
    tensor([11.5000, 12.5000])
    """
    check_rows("x", x)
    check_like("residual", residual, x)
    check_row_vector("bias", bias, x)
    seed = seed_or_draw(x, p, training=training, seed=seed)
    row_R, column, reason = (None, 0, None) if shard is None else locate(shard, x, dropping=seed is not None)
    y: Tensor = _op(
        backend,
        (x, residual, bias, seed, row_R),
        (column, None, p),
        torch_is_as_fast=bias is None,
        unsupported_reason=reason,
    )
    return y


def bias_dropout_residual_reference(
    x: Tensor,
    residual: Tensor,
    *,
    bias: Tensor | None = None,
    p: float = 0.0,
    seed: Tensor | None = None,
    shard: Shard | None = None,
) -> Tensor:
    """The definition of the op in training, in plain torch; without a seed nothing is dropped."""
    z = x if bias is None else x + bias
    return (z if seed is None else dropout_reference(z, p, seed=seed, shard=shard)) + residual


_op = Op("bias_dropout_residual", elementwise_formula, fused_elementwise)
