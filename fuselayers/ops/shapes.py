"""Checks of tensor arguments, at the door of every op of this folder."""

from torch import Tensor

__all__ = ["check_floating", "check_like", "check_row_vector", "check_rows"]


def check_floating(name: str, x: Tensor) -> None:
    """Raise TypeError unless `x` holds real floating-point numbers. Used by every op, for every tensor but a seed."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a floating-point tensor, got {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor, got {x.dtype}; convert it, for example with .float()")


def check_rows(name: str, x: Tensor) -> None:
    """Raise unless `x` is [..., N] and floating. Used by every op that looks along the last dimension."""
    check_floating(name, x)
    if not x.dim():
        raise ValueError(f"{name} must be [..., N], got a tensor without dimensions; give it one with .reshape(1)")


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
