"""Checks of tensor arguments, at the door of every op of this folder."""

from torch import Tensor

__all__ = ["check_like", "check_row_vector"]


def check_row_vector(name: str, vector: Tensor | None, x: Tensor) -> None:
    """Raise ValueError unless `vector` is None or fits x's last dimension, on its device. Used by ops with a bias."""
    if vector is None:
        return
    if vector.shape != x.shape[-1:]:
        wanted = list(x.shape[-1:])
        raise ValueError(f"{name} must be {wanted} to fit x {list(x.shape)}, got {list(vector.shape)}")
    if vector.device != x.device:
        raise ValueError(f"{name} must be on x's device {x.device}, got {vector.device}; move it with .to(x.device)")


def check_like(name: str, other: Tensor, x: Tensor) -> None:
    """Raise ValueError unless `other` has x's shape and device. Used by every op with a second input."""
    if other.shape != x.shape:
        raise ValueError(f"{name} must have x's shape {list(x.shape)}, got {list(other.shape)}")
    if other.device != x.device:
        raise ValueError(f"{name} must be on x's device {x.device}, got {other.device}; move it with .to(x.device)")
