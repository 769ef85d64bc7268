"""normalise -- the call, formula, reference and kernels that all norm ops share."""

from .call import normalise as normalise
from .call import rms_norm_saves_x_only as rms_norm_saves_x_only
from .formula import LayerNormOptions as LayerNormOptions
from .formula import NormStyle as NormStyle
from .formula import RmsNormOptions as RmsNormOptions
from .formula import check_style as check_style
from .formula import dropped_norm_reference as dropped_norm_reference
from .formula import norm_reference as norm_reference
