"""Blocks: an attention, a feedforward and their norms, in the order that gives them their names."""

from .block import Block as Block
from .post_norm import PostNormBlock as PostNormBlock
from .pre_norm import PreNormBlock as PreNormBlock
