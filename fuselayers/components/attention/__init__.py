"""Attention: how tokens look at each other."""

from .favor import FavorAttention as FavorAttention
from .fourier_mix import FourierMix as FourierMix
from .linear import LinearAttention as LinearAttention
from .multi_head import MultiHeadAttention as MultiHeadAttention
from .pooling import PoolingMix as PoolingMix
