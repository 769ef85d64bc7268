"""Checks of arguments, at the door of the components."""

from torch import Tensor

__all__ = ["check_last_dim", "check_length", "check_odd", "check_sequence"]


def check_last_dim(x: Tensor, size: int) -> None:
    """Raise ValueError unless x is [..., size]. Used by every feedforward that takes tokens one by one, and norm."""
    if x.shape[-1:] != (size,):
        raise ValueError(f"x must be [..., {size}], got {list(x.shape)}")


def check_sequence(x_BTD: Tensor, size: int) -> None:
    """Raise ValueError unless x is [B, T, size] and has tokens. Used by the attentions and conv_mlp."""
    if x_BTD.dim() != 3 or x_BTD.shape[-1] != size:
        raise ValueError(f"x must be [B, T, {size}], got {list(x_BTD.shape)}")
    if x_BTD.shape[1] == 0:
        raise ValueError(f"x must have at least one token to mix, got {list(x_BTD.shape)}; leave empty sequences out")


def check_length(tokens: int, context_length: int, *, built: str) -> None:
    """Raise ValueError where a sequence is longer than the context of what was built, "model" or "attention".

    Used by what has a weight for each place of the context.
    """
    if tokens > context_length:
        raise ValueError(
            f"a sequence of {tokens} tokens does not fit the context_length {context_length}; "
            f"shorten it, or build the {built} with a longer context"
        )


def check_odd(name: str, kernel_size: int) -> None:
    """Raise ValueError for an even size of a convolution that is not causal. Used by those over tokens."""
    if kernel_size % 2 == 0:
        raise ValueError(
            f"{name} must be odd for a convolution that sees as far back as forward, got {kernel_size}; "
            f"take {kernel_size + 1}"
        )
