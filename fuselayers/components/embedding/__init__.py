"""Embeddings: how tokens or pieces of an image become vectors."""

from .patch import PatchEmbedding as PatchEmbedding
from .token import TokenEmbedding as TokenEmbedding
