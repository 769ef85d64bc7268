"""learned -- y = x + table[:T]: one learned vector per position, as in GPT-2 and BERT.

x, y    [B, T, D]   B batch, T tokens, D model
table   [L, D]      L the context's length
"""

from typing import ClassVar

from torch import Tensor, nn

from ..checks import check_length
from ..ranges import Size, in_range
from ..registry import register
from .position import Position

__all__ = ["LearnedPosition"]


@register("position", "learned")
class LearnedPosition(Position):
    """Adds a learned vector per position.

    Args:
        context_length: L, the longest sequence in tokens.
        hidden_dim: D, the width of the model.

    Raises:
        ValueError: a size is below one; in `embed`, the sequence is longer than the context.

    >>> LearnedPosition(16, 8).table.weight.shape
    torch.Size([16, 8])
    """

    built_in: ClassVar[frozenset[str]] = frozenset({"context_length", "hidden_dim"})

    @in_range
    def __init__(self, context_length: Size, hidden_dim: Size) -> None:
        super().__init__()
        self.table = nn.Embedding(context_length, hidden_dim)
        # torch's own init, a deviation of 1, would drown token embeddings of the usual deviation 0.02.
        nn.init.normal_(self.table.weight, std=0.02)

    def embed(self, x_BTD: Tensor, *, first: int = 0) -> Tensor:
        """[B, T, D] -> [B, T, D], first + T at most the context's length."""
        end = first + x_BTD.shape[-2]
        check_length(end, self.table.num_embeddings, built="model")
        return x_BTD + self.table.weight[first:end]
