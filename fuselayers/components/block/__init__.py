"""Blocks: an attention and a feedforward, joined to the stream by a residual style."""

from .reversible import ReversibleBlock as ReversibleBlock
from .transformer import TransformerBlock as TransformerBlock
