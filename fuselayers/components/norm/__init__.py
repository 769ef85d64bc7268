"""Norms, which also join a sublayer's output to the residual stream."""

from .dyt import DynamicTanh as DynamicTanh
from .layer_norm import LayerNorm as LayerNorm
from .norm import Norm as Norm
from .rms_norm import RMSNorm as RMSNorm
from .skip import SkipNorm as SkipNorm
