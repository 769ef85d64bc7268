"""Checks of the components' arguments."""

from torch import Tensor

__all__ = ["check_last_dim", "check_length", "check_odd", "check_sequence"]


def check_last_dim(x: Tensor, size: int) -> None:
    """Raise ValueError unless x is [..., size]. Used by norms and by feedforwards that do not mix tokens."""
    if x.shape[-1:] != (size,):
        raise ValueError(f"x must be [..., {size}], got {list(x.shape)}")


def check_sequence(x_BTD: Tensor, size: int) -> None:
    """Raise ValueError unless x is [B, T, size] and has tokens. Used by the attentions and conv_mlp."""
    if x_BTD.dim() != 3 or x_BTD.shape[-1] != size:
        raise ValueError(f"x must be [B, T, {size}], got {list(x_BTD.shape)}")
    if x_BTD.shape[1] == 0:
        raise ValueError(f"x must have at least one token to mix, got {list(x_BTD.shape)}; leave empty sequences out")


def check_length(tokens: int, context_length: int, *, built: str) -> None:
    """Raise ValueError if a sequence is longer than the context of the "model" or "attention".

    Used by components with a weight for each position.
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
