"""Layers that are one fused op, in place of three or four layers."""

from .bias_activation_dropout import FusedBiasActivationDropout as FusedBiasActivationDropout
from .bias_dropout_residual import FusedBiasDropoutResidual as FusedBiasDropoutResidual
from .bias_dropout_residual_layer_norm import (
    FusedBiasDropoutResidualLayerNorm as FusedBiasDropoutResidualLayerNorm,
)
