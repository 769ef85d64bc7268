"""Checks of the components' arguments, and the removal of padding.

x                  [B, T, D]        B batch, T tokens, D model
key_padding_mask   [B, T]           True for a real token; [B, S] if the keys are not only those of x
"""

import torch
from torch import Tensor


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
    """Raise ValueError if a sequence is longer than the context. `built` is "model" or "attention".

    Used by components with a weight for each position.
    """
    if tokens > context_length:
        raise ValueError(
            f"a sequence of {tokens} tokens does not fit the context_length {context_length}; "
            f"shorten it, or build the {built} with a longer context"
        )


def check_odd(name: str, kernel_size: int) -> None:
    """Raise ValueError for an even kernel size. Used by convolutions over tokens that are not causal."""
    if kernel_size % 2 == 0:
        raise ValueError(
            f"{name} must be odd where the convolution is not causal, got {kernel_size}; use {kernel_size + 1}"
        )


def check_input(x_BTD: Tensor, hidden_dim: int, key_padding_mask: Tensor | None) -> None:
    """Raise ValueError unless x is [B, T, hidden_dim] and the mask, if any, fits it.

    Used by every self-attention, and by conv_mlp.
    """
    check_sequence(x_BTD, hidden_dim)
    if key_padding_mask is not None:
        check_padding(key_padding_mask, x_BTD)


def check_padding(mask: Tensor, x_BTD: Tensor, *, called: str = "x", before: int = 0) -> None:
    """Raise ValueError unless a key_padding_mask is bool with a value for each token of x and of the cache.

    Used by `check_input`, and by attention with a memory or a cache.

    Args:
        mask: the key_padding_mask.
        x_BTD: the source of the keys.
        called: the name of x in the error text.
        before: the number of tokens in the cache.
    """
    if mask.dtype != torch.bool or mask.shape != (x_BTD.shape[0], before + x_BTD.shape[1]):
        cached = f" after {before} tokens in the cache" if before else ""
        raise ValueError(
            f"key_padding_mask must be torch.bool [{x_BTD.shape[0]}, {before + x_BTD.shape[1]}] to fit {called} "
            f"{list(x_BTD.shape)}{cached}, True for a real token, got {mask.dtype} {list(mask.shape)}"
        )


def zero_padding(x: Tensor, key_padding_mask: Tensor | None) -> Tensor:
    """Return x, [B, T, D] or [B, H, T, C], with zeros where a token is padding.

    Used by conv_mlp and the attentions that sum over tokens.

    >>> zero_padding(torch.ones(1, 2, 3), torch.tensor([[True, False]]))
    tensor([[[1., 1., 1.],
             [0., 0., 0.]]])
    """
    if key_padding_mask is None:
        return x
    padding = ~key_padding_mask[..., None]
    return x.masked_fill(padding if x.dim() == 3 else padding[:, None], 0.0)
