"""Attention: how tokens look at each other."""

from .fourier_mix import FourierMix as FourierMix
from .multi_head import MultiHeadAttention as MultiHeadAttention
from .pooling import PoolingMix as PoolingMix
