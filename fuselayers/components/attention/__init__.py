"""Attention: how tokens look at each other."""

from .multi_head import MultiHeadAttention as MultiHeadAttention
