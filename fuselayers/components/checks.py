"""Checks of arguments, at the door of the components."""

__all__ = ["check_positive"]


def check_positive(name: str, value: int) -> None:
    """Raise ValueError unless `value` is at least one. Used by every component with a size."""
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
