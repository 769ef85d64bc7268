"""Checks of arguments, at the door of the components."""

from torch import Tensor

__all__ = ["check_last_dim"]


def check_last_dim(x: Tensor, size: int) -> None:
    """Raise ValueError unless x is [..., size]. Used by every feedforward and norm."""
    if x.shape[-1:] != (size,):
        raise ValueError(f"x must be [..., {size}], got {list(x.shape)}")
