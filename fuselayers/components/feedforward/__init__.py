"""Feedforward layers. Most of them process each token separately."""

from .conv_mlp import ConvMLP as ConvMLP
from .gated_mlp import GatedMLP as GatedMLP
from .mixture_of_experts import MixtureOfExperts as MixtureOfExperts
from .mlp import MLP as MLP
from .mlp import FusedMLP as FusedMLP
