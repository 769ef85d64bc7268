"""bias_activation_dropout -- y = dropout(activation(x + bias), p): the inside of an MLP, between its two matmuls.

    x, y   [..., N]   any float dtype
    bias   [N]        optional
    seed   []         int64

    forward    y     = act(x + bias) * keep * scale
    backward   dx    = dy * keep * scale * act'(x + bias)
               dbias = dx summed over every dimension but the last

Saved for backward: a seed, no mask (see dropout), and what the activation keeps: in eager mode one tensor of x's size
(the pre-activation, or for relu, squared_relu and star_relu its positive part), two for smelu, none for the identity;
one at most when a compiler fuses it. Floor: one read of x and one write of y forward, reads of dy and x and a write of
dx backward.
"""

from torch import Tensor

from .activations import activate, check_activation
from .dropout import dropout, dropout_reference
from .philox import check_probability, check_seed
from .shapes import check_row_vector, check_rows

__all__ = ["bias_activation_dropout", "bias_activation_dropout_reference"]


def bias_activation_dropout(
    x: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    p: float = 0.0,
    training: bool = True,
    seed: Tensor | None = None,
) -> Tensor:
    """Return dropout(activation(x + bias), p).

    Args:
        x: [..., N], any float dtype.
        bias: [N], or None for no bias.
        activation: a name in ACTIVATIONS, or None for the identity.
        p: dropout probability, 0 <= p < 1.
        training: False leaves the dropout out.
        seed: int64 tensor of shape [] on x's device, which fixes the mask; drawn from torch's generator when None.

    Raises:
        ValueError: x has no dimension, the bias or the seed does not fit it, the activation is unknown, or p is outside
            [0, 1).
        TypeError: a tensor is not floating, the seed is not a tensor, p is one, or the activation is no name.
        RuntimeError: without a seed, inside a `torch.vmap` whose `randomness` is "error", which is its default.

    >>> import torch
    >>> bias_activation_dropout(torch.tensor([[-1.0, 2.0]]), torch.tensor([0.5, 0.5]), activation="relu")
    tensor([[0.0000, 2.5000]])
    """
    check_rows("x", x)
    check_row_vector("bias", bias, x)
    check_activation(activation)
    check_probability(p)
    check_seed(seed, x.device)
    z = x if bias is None else x + bias
    return dropout(activate(z, activation), p, training=training, seed=seed)


def bias_activation_dropout_reference(
    x: Tensor, bias: Tensor | None = None, *, activation: str | None = None, p: float = 0.0, seed: Tensor | None = None
) -> Tensor:
    """What the op means in training, in plain torch; without a seed nothing is dropped."""
    y = activate(x if bias is None else x + bias, activation)
    return y if seed is None else dropout_reference(y, p, seed=seed)
