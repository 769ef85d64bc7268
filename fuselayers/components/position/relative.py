"""relative -- a learned bias on the scores for each range of distances, as in T5.

    bias[h, t, s] = table[bucket(s - (first + t)), h]      [H, T, S]   H heads, T queries, S = first + T keys
    table           [num_buckets, H]

A distance below half the buckets has a bucket of its own; longer ones share buckets, which grow logarithmically up to
max_distance, and everything beyond is in the last. Without causal, keys that follow have half of the buckets.

Raffel et al. 2020, section 2.1; the buckets are those of the released code (mesh_tensorflow, relative_position_bucket).
"""

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ranges import Size, in_range
from ..registry import register
from .position import Position, check_has_heads

__all__ = ["RelativePosition"]


@register("position", "relative")
class RelativePosition(Position):
    """Adds a learned bias per head and range of distances to the scores of every layer; works for any length.

    Args:
        num_heads: H, the number of query heads.
        num_buckets: number of ranges of distances, in both directions together.
        max_distance: distance in tokens from which all share a bucket.
        causal: whether a token looks only at itself and the tokens before it, so that these have all the buckets.

    Raises:
        ValueError: num_heads is below one, or None: the attention has no heads; too few buckets; or a max_distance
            that the buckets of single distances reach already.

    >>> position = RelativePosition(num_heads=2, num_buckets=4, max_distance=3)
    >>> position.buckets(torch.arange(-4, 1))
    tensor([3, 3, 2, 1, 0])
    """

    built_in: ClassVar[frozenset[str]] = frozenset({"num_heads", "causal"})

    # Elsewhere `table` holds vectors; see `carry_weights`.
    weights_mean: ClassVar[str] = "biases of distances"

    @in_range
    def __init__(
        self, *, num_heads: Size | None, num_buckets: Size = 32, max_distance: Size = 128, causal: bool = True
    ) -> None:
        super().__init__()
        fewest = 2 if causal else 4
        if num_buckets < fewest:
            kind = "causal" if causal else "not causal"
            raise ValueError(f"num_buckets must be at least {fewest} where attention is {kind}, got {num_buckets}")
        self.max_distance = max_distance
        self.causal = causal
        self._of_a_side = num_buckets if causal else num_buckets // 2
        self._single = self._of_a_side // 2
        if max_distance <= self._single:
            raise ValueError(
                f"max_distance must be above {self._single}, the distances with a bucket of their own among "
                f"{num_buckets}, got {max_distance}; raise it, or take fewer buckets"
            )
        self.table = nn.Embedding(num_buckets, check_has_heads("relative", num_heads))
        # As the other learned positions: torch's own init, a deviation of 1, would outweigh the scores.
        nn.init.normal_(self.table.weight, std=0.02)

    def buckets(self, distance: Tensor) -> Tensor:
        """Return the bucket of each distance, the key's position minus the query's: int64, any shape -> the same shape.

        If attention is causal, later keys are in bucket 0.
        """
        if self.causal:
            side, distance = torch.zeros_like(distance), (-distance).clamp(min=0)
        else:
            side, distance = (distance > 0) * self._of_a_side, distance.abs()
        # Term by term as in T5's code, in float32: rounding decides where a logarithm is close to an integer.
        far = torch.log(distance.clamp(min=self._single).float() / self._single)
        far = far / math.log(self.max_distance / self._single) * (self._of_a_side - self._single)
        shared = (self._single + far.long()).clamp(max=self._of_a_side - 1)
        return side + torch.where(distance < self._single, distance, shared)

    def bias(self, x_BTD: Tensor, *, first: int = 0) -> Tensor:
        """[B, T, D] -> [H, T, first + T] in x's dtype."""
        tokens = x_BTD.shape[-2]
        end = first + tokens
        distance = torch.arange(1 - end, tokens, device=x_BTD.device)
        # One look-up per distance, not per query and key: row t is a window of the distances, which starts one distance
        # before that of the previous query.
        bias_HN = F.embedding(self.buckets(distance), self.table.weight).to(x_BTD.dtype).t()
        return bias_HN.unfold(-1, end, 1).flip(-2)

    def extra_repr(self) -> str:
        return f"max_distance={self.max_distance}, causal={self.causal}"
