"""Attention: how tokens look at each other."""

from .cache import KeyValueCache as KeyValueCache
from .favor import FavorAttention as FavorAttention
from .fourier_mix import FourierMix as FourierMix
from .linear import LinearAttention as LinearAttention
from .linformer import LinformerAttention as LinformerAttention
from .local import LocalAttention as LocalAttention
from .masks import block_mask as block_mask
from .multi_head import MultiHeadAttention as MultiHeadAttention
from .nystrom import NystromAttention as NystromAttention
from .pooling import PoolingMix as PoolingMix
