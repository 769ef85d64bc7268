"""Checks of arguments, at the door of the components."""

from torch import Tensor

__all__ = ["check_eps", "check_last_dim", "check_positive"]


def check_positive(name: str, value: int) -> None:
    """Raise ValueError unless `value` is at least one. Used by every component with a size."""
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def check_eps(eps: float) -> None:
    """Raise ValueError unless `eps` is 0 or more. Used by every norm."""
    if not eps >= 0:
        raise ValueError(f"eps must be 0 or more, got {eps}")


def check_last_dim(x: Tensor, size: int) -> None:
    """Raise ValueError unless x is [..., size]. Used by every feedforward and norm."""
    if x.shape[-1:] != (size,):
        raise ValueError(f"x must be [..., {size}], got {list(x.shape)}")
