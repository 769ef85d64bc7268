"""Checks of tensor arguments, which every public op calls first."""

from typing import Final

import torch
from torch import Tensor

from .implementations import autocast_dtype

__all__ = ["check_dense", "check_floating", "check_like", "check_linear", "check_row_vector", "check_rows"]


# Floats of 8 bits and less are for matrix products with scales. Sparse tensors would need other ops.
_DTYPES: Final = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64))


def check_floating(name: str, x: Tensor) -> None:
    """Raise TypeError unless `x` is dense and holds floating-point numbers of 16 to 64 bits.

    Used by every op, for every tensor but a seed, a mask and a target.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a floating-point tensor, got {type(x).__name__}")
    if x.dtype not in _DTYPES:
        wanted = "a floating-point tensor of 16 bits at least" if x.is_floating_point() else "a floating-point tensor"
        advice = "call .dequantize()" if x.is_quantized else "convert it, for example with .float()"
        raise TypeError(f"{name} must be {wanted}, got {x.dtype}; {advice}")
    check_dense(name, x)


def check_dense(name: str, x: Tensor) -> None:
    """Raise TypeError unless `x` has a strided or jagged layout. Used for masks and targets too."""
    if x.layout not in (torch.strided, torch.jagged):
        raise TypeError(f"{name} must be a dense tensor, got layout {x.layout}; call .to_dense()")


def check_rows(name: str, x: Tensor) -> None:
    """Raise unless `x` is [..., N] and floating. Used by every op that works along the last dimension."""
    check_floating(name, x)
    if not x.dim():
        raise ValueError(f"{name} must be [..., N], got a tensor without dimensions; add one with .reshape(1)")


def check_row_vector(name: str, vector: Tensor | None, x: Tensor) -> None:
    """Raise unless `vector` is None or fits x's last dimension, on its device. Used by ops with a bias."""
    if vector is None:
        return
    check_floating(name, vector)
    if vector.shape != x.shape[-1:]:
        wanted = list(x.shape[-1:])
        raise ValueError(f"{name} must be {wanted} to fit x {list(x.shape)}, got {list(vector.shape)}")
    if vector.device != x.device:
        raise ValueError(f"{name} must be on x's device {x.device}, got {vector.device}; move it with .to(x.device)")


def check_like(name: str, other: Tensor, x: Tensor) -> None:
    """Raise unless `other` is floating and has x's shape and device. Used by every op with a second input."""
    check_floating(name, other)
    if other.shape != x.shape:
        raise ValueError(f"{name} must have x's shape {list(x.shape)}, got {list(other.shape)}")
    if other.device != x.device:
        raise ValueError(f"{name} must be on x's device {x.device}, got {other.device}; move it with .to(x.device)")


def check_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise unless x [..., D], weight [V, D] and bias [V] or None fit each other, as for F.linear, and V is not 0.

    All must be on one device and, outside autocast, have one dtype. Used by the losses with a linear layer.
    """
    check_rows("x", x)
    check_floating("weight", weight)
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(f"weight must be [V, {x.shape[-1]}] to fit x {list(x.shape)}, got {list(weight.shape)}")
    others = {"weight": weight}
    if bias is not None:
        check_floating("bias", bias)
        if bias.shape != weight.shape[:1]:
            wanted = list(weight.shape[:1])
            raise ValueError(f"bias must be {wanted} to fit weight {list(weight.shape)}, got {list(bias.shape)}")
        others["bias"] = bias
    for name, other in others.items():
        if other.device != x.device:
            raise ValueError(f"{name} must be on x's device {x.device}, got {other.device}; move it with .to(x.device)")
        if other.dtype != x.dtype and autocast_dtype(x.device) is None:
            raise TypeError(
                f"{name} must have x's dtype {x.dtype}, got {other.dtype}; convert it, or call under torch.autocast"
            )
    if not weight.shape[0]:
        raise ValueError(f"weight must have at least one class, got {list(weight.shape)}")
