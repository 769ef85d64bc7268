"""token -- y = weight[token]: one learned vector per token.

    tokens   [...]         int64 or int32
    y        [..., D]      D model
    weight   [V, D]        V vocabulary

Scaled, as in the first transformer (Vaswani et al. 2017, section 3.4) and Gemma: y = sqrt(D) * weight[token].
"""

import math
from typing import ClassVar

from torch import Tensor, nn

from ..ranges import Size, in_range
from ..registry import register

__all__ = ["TokenEmbedding"]


@register("embedding", "token")
class TokenEmbedding(nn.Embedding):
    """torch's embedding, optionally scaled. Its `weight`, which a tied head reads, is unscaled.

    Args:
        vocab_size: V, number of different tokens.
        hidden_dim: D, the width of the model.
        scale: whether the vectors are multiplied by sqrt(D).

    Raises:
        ValueError: a size is below one.

    >>> TokenEmbedding(10, 8, scale=True)
    TokenEmbedding(10, 8, scale=True)
    """

    built_in: ClassVar[frozenset[str]] = frozenset({"vocab_size", "hidden_dim"})

    @in_range
    def __init__(self, vocab_size: Size, hidden_dim: Size, *, scale: bool = False) -> None:
        super().__init__(vocab_size, hidden_dim)
        self.scale = scale

    @property
    def weights_mean(self) -> str | None:
        """The meaning of the weight if it is not the vectors themselves, for `carry_weights`."""
        return "vectors by sqrt(D)" if self.scale else None

    def forward(self, tokens: Tensor) -> Tensor:
        """[...] -> [..., D] in the weight's dtype."""
        y = super().forward(tokens)
        return y * math.sqrt(self.embedding_dim) if self.scale else y

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, scale={self.scale}"
