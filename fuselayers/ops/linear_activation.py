"""linear_activation -- y = act(x W^T + b): a linear layer and its activation.

    x        [..., K]   any float dtype; R rows of it
    weight   [N, K]     of x's dtype, as in nn.Linear
    bias     [N]        optional, of x's dtype
    y, z     [..., N]   of x's dtype; z = x W^T + b

    forward    y       = act(z)
    backward   dz      = dy * act'(z)
               dx      = dz W
               dweight = dz^T x
               dbias   = dz summed over every dimension but the last

Saved for backward: x, the weight, and z; y in place of z where it gives the same slope (relu, leaky_relu), and neither
for the identity. The eager formula saves what its activation saves.

Note: [which matmul] cuBLAS multiplies and adds the bias, and one kernel each way does the rest. An activation in the
matmul's epilogue would save two trips of y to memory, 2 R N elements, but it would need a matmul of our own. For 8192
rows and K = N = 4096 in bfloat16 that is 40 us of an H100's memory beside 280 us of its arithmetic, by the data sheet
and not measured: a matmul an eighth slower than cuBLAS's loses it.

Bytes moved beside the matmuls, in elements: 2 R N forward (R N where z is saved) and 3 R N backward, for dz and dbias
(2 for the identity).

The slope comes from z in the result's dtype, so the gradients are as exact as torch's.

Under autocast it behaves as F.linear: the product and the result have autocast's dtype.
"""

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from .activations import activate, check_activation
from .bias_activation_dropout import activation_gradients, bias_activation_dropout_op
from .implementations import Op, differentiable_gradients, needs_grad
from .shapes import check_linear

__all__ = ["linear_activation", "linear_activation_reference"]

# Activations whose slope at the result is the slope at the pre-activation.
_SLOPE_OF_RESULT: Final = frozenset({"relu", "leaky_relu"})


def linear_activation(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str | None = None, backend: str = "auto"
) -> Tensor:
    """Return activation(x @ weight.T + bias).

    Args:
        x: [..., K], any float dtype.
        weight: [N, K].
        bias: [N], or None for no bias.
        activation: a name in ACTIVATIONS, or None for the identity.
        backend: see `fuselayers.ops.implementations.dispatch`; the matmul is always torch's.

    Raises:
        ValueError: x has no dimension, weight or bias do not fit it, or the activation or the backend is unknown.
        TypeError: a tensor is not dense and floating or, outside autocast, not of x's dtype; or the activation is no
            name.
        RuntimeError: the requested backend cannot take the call.

    >>> import torch
    >>> linear_activation(torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 1.0], [1.0, -1.0]]), activation="relu")
    tensor([3., 0.])
    """
    check_linear(x, weight, bias)
    check_activation(activation)
    y: Tensor = _op(backend, (x, weight, bias), (activation,))
    return y


def linear_activation_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str | None = None
) -> Tensor:
    """The definition of the op, in plain torch."""
    return _formula(x, weight, bias, activation)


def _formula(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    return activate(F.linear(x, weight, bias), activation)


def _fused(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """cuBLAS adds the bias to its sums before rounding; the activation is a separate kernel.

    `torch._addmm_activation` would leave the activation to cuBLASLt, but its relu turns NaN into 0
    (https://forums.developer.nvidia.com/t/329783), its gelu is the tanh form with undocumented precision, neither
    returns z, and for K = 0 torch skips the activation.
    """
    if activation is None:
        return F.linear(x, weight, bias)
    # As rows: with a strided x of more dimensions torch adds the bias in a separate kernel.
    x_RK = x.flatten(0, -2) if x.dim() > 1 else x[None]
    z = F.linear(x_RK, weight, None if bias is None else bias.detach())
    z = z.view(*x.shape[:-1], weight.shape[0])
    if needs_grad(z, bias):
        y: Tensor = _Activation.apply(z, bias, activation)  # type: ignore[no-untyped-call]
        return y
    return _activated(z, activation)


def _activated(z: Tensor, activation: str) -> Tensor:
    # Not the public function, which takes its formula while a graph is compiled.
    y: Tensor = bias_activation_dropout_op(z, None, None, None, 0, activation, 0.0)
    return y


class _Activation(torch.autograd.Function):
    """act(z) for a z that includes the bias.

    The bias is an argument for its gradient: the kernel that computes dz sums it too, where the backward of F.linear
    would read dz from memory again.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, bias: Tensor | None, activation: str) -> Tensor:
        y = _activated(z, activation)
        ctx.save_for_backward(y if activation in _SLOPE_OF_RESULT else z)
        # Not saved with save_for_backward: backward reads no values of it, and the caller may change them, as with
        # F.linear.
        ctx.bias, ctx.activation = bias, activation
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (z,), bias = ctx.saved_tensors, ctx.bias
        wants_z, wants_bias = ctx.needs_input_grad[:2]
        if torch.is_grad_enabled():

            def formula(z: Tensor, bias: Tensor | None) -> Tensor:
                # z includes the value of the bias but not its derivative.
                return activate(z if bias is None else z + (bias - bias.detach()).to(z.dtype), ctx.activation)

            return (*differentiable_gradients(formula, (z, bias), (dy,), (wants_z, wants_bias)), None)
        dz, dbias = activation_gradients(
            dy, z, None, None, None, 0, ctx.activation, 0.0, dy.dtype, bias.dtype if wants_bias else None
        )
        return dz if wants_z else None, dbias if wants_bias else None, None


_op = Op("linear_activation", _formula, _fused, cpu_from=None)
