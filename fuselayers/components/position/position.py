"""What every kind of position offers: a hook on the token embeddings and one on queries and keys.

x      [B, T, D]      B batch, T tokens, D model
q, k   [B, H, T, C]   H heads (fewer for k where they are grouped), C channels of a head
"""

from torch import Tensor, nn

__all__ = ["Position"]


class Position(nn.Module):
    """The base of the positions. Both hooks are the identity; a subclass overrides the one it works through.

    >>> import torch
    >>> x = torch.ones(1, 2, 3)
    >>> Position()(x) is x
    True
    """

    def embed(self, x_BTD: Tensor) -> Tensor:
        """Return the token embeddings with their positions put in."""
        return x_BTD

    def rotate(self, q_BHTC: Tensor, k_BGTC: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys with their positions put in."""
        return q_BHTC, k_BGTC

    def check_head_dim(self, head_dim: int) -> None:
        """Raise ValueError unless `rotate` can take heads of so many channels; models call it when they are built."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        """`embed`, under the name that hooks and wrappers of modules know."""
        return self.embed(x_BTD)
