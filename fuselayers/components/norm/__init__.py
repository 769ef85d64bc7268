"""Norms, which also join a sublayer's output to the residual stream."""

from .layer_norm import LayerNorm as LayerNorm
from .norm import Norm as Norm
from .rms_norm import RMSNorm as RMSNorm
