"""none -- no positions: a causal model can count them by itself (Haviv et al. 2022)."""

from ..registry import register
from .position import Position

__all__ = ["NoPosition"]


@register("position", "none")
class NoPosition(Position):
    """Leaves embeddings, queries and keys as they are."""
