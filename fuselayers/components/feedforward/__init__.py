"""Feedforward layers: what a block does to each token by itself."""

from .fused_mlp import FusedMLP as FusedMLP
from .gated_mlp import GatedMLP as GatedMLP
from .mlp import MLP as MLP
