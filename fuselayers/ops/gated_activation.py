"""gated_activation -- y = act(gate) * up: the inside of a gated MLP (swiglu for silu, geglu for gelu, reglu for relu).

    gate, up, y   [..., N]    any float dtype
    gate packed   [..., 2N]   the gate's half first, when `up` is None

    forward    y     = act(gate) * up
    backward   dgate = dy * up * act'(gate)
               dup   = dy * act(gate)

Saved for backward: gate and up when a compiler fuses it. In eager mode act(gate) too, so three tensors of up's size;
two for relu, whose result stands for the gate, and for the identity; four for smelu.

Shazeer, "GLU variants improve transformer", 2020.
"""

from torch import Tensor

from .activations import activate, check_activation
from .shapes import check_like, check_rows

__all__ = ["gated_activation", "gated_activation_reference"]


def gated_activation(gate: Tensor, up: Tensor | None = None, *, activation: str | None = "silu") -> Tensor:
    """Return activation(gate) * up.

    Args:
        gate: [..., N], any float dtype; or [..., 2N] with gate and up side by side when `up` is None.
        up: [..., N] or None.
        activation: a name in ACTIVATIONS, or None for the identity (a bilinear layer).

    Raises:
        ValueError: gate has no dimension, up does not fit it, a packed gate has an odd width, or the activation is
            unknown.
        TypeError: a tensor is not floating, or the activation is no name.

    >>> import torch
    >>> gated_activation(torch.tensor([2.0, -1.0, 3.0, 5.0]), activation="relu")
    tensor([6., 0.])
    """
    check_rows("gate", gate)
    check_activation(activation)
    if up is None:
        if gate.shape[-1] % 2:
            raise ValueError(f"a packed gate must have an even last dimension, got {list(gate.shape)}")
        gate, up = gate.chunk(2, dim=-1)
    else:
        check_like("up", up, gate)
    return activate(gate, activation) * up


def gated_activation_reference(gate: Tensor, up: Tensor, *, activation: str | None = "silu") -> Tensor:
    """What the op means, in plain torch."""
    return activate(gate, activation) * up
