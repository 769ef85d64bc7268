"""bias_activation_dropout -- y = dropout(activation(x + bias), p): the part of an MLP between its two matmuls.

    x, y   [..., N]   any float dtype
    bias   [N]        optional
    seed   []         int64

    forward    y     = act(x + bias) * keep * scale
    backward   dx    = dy * keep * scale * act'(x + bias)
               dbias = dx summed over every dimension but the last

Saved for backward: a seed and no dropout mask (see dropout, also for shards). The kernels also save x and the bias. The
eager formula also saves what its activation saves: the pre-activation, the positive part for relu, squared_relu and
star_relu, the result for sigmoid, two tensors and a bool mask for smelu. The identity saves nothing more.

Bytes moved, in elements of x: 2 forward (read x, write y), 3 backward (read dy and x, write dx; 2 for the identity, and
1 for the identity without dropout: dx is dy, which torch sums for the bias). In addition, each program of a kernel
reads the bias and writes one float32 row for its gradient.

Formula, kernels and gradients are those of elementwise.
"""

from torch import Tensor

from .activations import activate, check_activation
from .draw import seed_or_draw
from .dropout import dropout_reference
from .elementwise import elementwise_formula, fused_elementwise
from .implementations import Op
from .shapes import check_row_vector, check_rows
from .shards import Shard, locate

__all__ = ["bias_activation_dropout", "bias_activation_dropout_reference"]


def bias_activation_dropout(
    x: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    p: float = 0.0,
    training: bool = True,
    seed: Tensor | None = None,
    shard: Shard | None = None,
    backend: str = "auto",
) -> Tensor:
    """Return dropout(activation(x + bias), p).

    Args:
        x: [..., N], any float dtype.
        bias: [N], or None for no bias.
        activation: a name in ACTIVATIONS, or None for the identity.
        p: dropout probability, 0 <= p <= 1.
        training: False drops nothing.
        seed: int64 tensor of shape [] on x's device, which fixes the mask; drawn from torch's generator when None.
        shard: the position of x in a larger tensor, whose mask it uses; None if x is the whole tensor.
        backend: see `fuselayers.ops.implementations.dispatch`.

    Without a bias, an activation and dropout x itself is returned.

    Raises:
        ValueError: x has no dimension, the bias, the seed or the shard does not fit it, the activation or the backend
            is unknown, or p is outside [0, 1].
        TypeError: a tensor is not dense and floating, the seed is not a tensor, p is a tensor, the activation is not a
            string, or `shard` is not a Shard.
        RuntimeError: without a seed, inside a `torch.vmap` whose `randomness` is "error", which is its default; or the
            requested backend cannot take the call.

    >>> import torch
    >>> bias_activation_dropout(torch.tensor([[-1.0, 2.0]]), torch.tensor([0.5, 0.5]), activation="relu")
    tensor([[0.0000, 2.5000]])
    """
    check_rows("x", x)
    check_row_vector("bias", bias, x)
    check_activation(activation)
    seed = seed_or_draw(x, p, training=training, seed=seed)
    row_R, column, reason = (None, 0, None) if shard is None else locate(shard, x, dropping=seed is not None)
    if bias is None and activation is None and seed is None:
        return x
    y: Tensor = _op(
        backend,
        (x, None, bias, seed, row_R),
        (column, activation, p),
        unsupported_reason=reason,
    )
    return y


def bias_activation_dropout_reference(
    x: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    p: float = 0.0,
    seed: Tensor | None = None,
    shard: Shard | None = None,
) -> Tensor:
    """The definition of the op in training, in plain torch; without a seed nothing is dropped."""
    y = activate(x if bias is None else x + bias, activation)
    return y if seed is None else dropout_reference(y, p, seed=seed, shard=shard)


_op = Op("bias_activation_dropout", elementwise_formula, fused_elementwise)
