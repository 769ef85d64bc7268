"""normalise -- what all norm ops share: formula, reference, kernels."""

from .call import normalise as normalise
from .call import normalise_by_formula as normalise_by_formula
from .formula import NormStyle as NormStyle
from .formula import check_style as check_style
from .formula import norm_formula as norm_formula
from .formula import norm_reference as norm_reference
