"""Fused transformer layers for PyTorch: build them from config, swap them, or import them."""

from . import ops as ops
from . import partition as partition
