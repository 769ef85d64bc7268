"""bias_dropout_residual -- y = dropout(x + bias, p) + residual: how a sublayer's output joins the residual stream.

    x, residual, y   [..., N]   any float dtype
    bias             [N]        optional
    seed             []         int64

    forward    y         = (x + bias) * keep * scale + residual
    backward   dx        = dy * keep * scale
               dbias     = dx summed over every dimension but the last
               dresidual = dy

Saved for backward: a seed (see dropout). Dtypes promote as in torch's own sums. Floor: two reads and a write forward, a
read and a write backward.
"""

from torch import Tensor

from .dropout import dropout, dropout_reference
from .philox import check_probability, check_seed
from .shapes import check_like, check_row_vector, check_rows

__all__ = ["bias_dropout_residual", "bias_dropout_residual_reference"]


def bias_dropout_residual(
    x: Tensor,
    residual: Tensor,
    *,
    bias: Tensor | None = None,
    p: float = 0.0,
    training: bool = True,
    seed: Tensor | None = None,
) -> Tensor:
    """Return dropout(x + bias, p) + residual.

    Args:
        x: [..., N], the sublayer's output, any float dtype.
        residual: [..., N], the stream it joins.
        bias: [N], or None for no bias.
        p: dropout probability, 0 <= p < 1.
        training: False leaves the dropout out.
        seed: int64 tensor of shape [] on x's device, which fixes the mask; drawn from torch's generator when None.

    Raises:
        ValueError: x has no dimension, the residual, the bias or the seed does not fit it, or p is outside [0, 1).
        TypeError: a tensor is not floating, the seed is not a tensor, or p is one.
        RuntimeError: without a seed, inside a `torch.vmap` whose `randomness` is "error", which is its default.

    >>> import torch
    >>> bias_dropout_residual(torch.tensor([1.0, 2.0]), torch.tensor([10.0, 10.0]), bias=torch.tensor([0.5, 0.5]))
    tensor([11.5000, 12.5000])
    """
    check_rows("x", x)
    check_like("residual", residual, x)
    check_row_vector("bias", bias, x)
    check_probability(p)
    check_seed(seed, x.device)
    z = x if bias is None else x + bias
    return dropout(z, p, training=training, seed=seed) + residual


def bias_dropout_residual_reference(
    x: Tensor, residual: Tensor, *, bias: Tensor | None = None, p: float = 0.0, seed: Tensor | None = None
) -> Tensor:
    """What the op means in training, in plain torch; without a seed nothing is dropped."""
    z = x if bias is None else x + bias
    return (z if seed is None else dropout_reference(z, p, seed=seed)) + residual
