"""Attention: how tokens look at each other."""

from .cache import KeyValueCache as KeyValueCache
from .masks import block_diagonal_mask as block_diagonal_mask
from .masks import block_mask as block_mask
from .multi_head import MultiHeadAttention as MultiHeadAttention
