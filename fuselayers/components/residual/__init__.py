"""Layers that join a sublayer's output to the residual stream."""

from .bias_dropout_residual import FusedBiasDropoutResidual as FusedBiasDropoutResidual
from .bias_dropout_residual_layer_norm import (
    FusedBiasDropoutResidualLayerNorm as FusedBiasDropoutResidualLayerNorm,
)
