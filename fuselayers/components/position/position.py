"""The base of the positions: hooks on the token embeddings, on queries and keys, and on the scores.

x      [B, T, D]      B batch, T tokens, D model
q, k   [B, H, T, C]   H heads (fewer for k where they are grouped), C channels of a head
bias   [H, T, S]      S keys
"""

from torch import Tensor, nn

from ..registry import register

__all__ = ["NoPosition", "Position", "check_has_heads"]


class Position(nn.Module):
    """The base of the positions. The hooks do nothing; a subclass overrides one of them.

    `first` is the position of the first token: 0, or during generation the number of earlier tokens.

    >>> import torch
    >>> x = torch.ones(1, 2, 3)
    >>> Position()(x) is x
    True
    """

    def embed(self, x_BTD: Tensor, *, first: int = 0) -> Tensor:
        """Return the token embeddings with their positions."""
        return x_BTD

    def rotate(self, q_BHTC: Tensor, k_BGTC: Tensor, *, first: int = 0) -> tuple[Tensor, Tensor]:
        """Return queries and keys of the same tokens with their positions."""
        return q_BHTC, k_BGTC

    def bias(self, x_BTD: Tensor, *, first: int = 0) -> Tensor | None:
        """Return the bias of the scores of the tokens of x and all keys up to their last: [H, T, first + T].

        Only dtype, device and the number of tokens of x matter. None is no bias.
        """
        return None

    def check_head_dim(self, head_dim: int) -> None:
        """Raise ValueError unless `rotate` can take heads of so many channels; models call it when they are built."""

    def forward(self, x_BTD: Tensor, *, first: int = 0) -> Tensor:
        """Call `embed`, for hooks and wrappers of modules."""
        return self.embed(x_BTD, first=first)

    @property
    def needs(self) -> frozenset[str]:
        """The inputs of an attention that it needs: "rotate", "bias", both or none."""
        hooks = ("rotate", "bias")
        return frozenset(hook for hook in hooks if getattr(type(self), hook) is not getattr(Position, hook))


@register("position", "none")
class NoPosition(Position):
    """Leaves embeddings, queries and keys as they are: a causal model can count them by itself (Haviv et al. 2022)."""


def check_has_heads(name: str, num_heads: int | None) -> int:
    """Return `num_heads`; raise ValueError where it is None. Used by the positions with a bias per head.

    Args:
        name: the position's, for the error text.
        num_heads: the attention's; None where it has no heads.
    """
    if num_heads is None:
        raise ValueError(
            f"position {name!r} has a bias for each head, and this attention has no heads; choose an attention with "
            "num_heads, or another position"
        )
    return num_heads
