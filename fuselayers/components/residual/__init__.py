"""Residual styles: how the sublayers of a block join the stream, and where the norms stand."""

from .deepnorm import DeepNormResidual as DeepNormResidual
from .parallel import ParallelResidual as ParallelResidual
from .post import PostResidual as PostResidual
from .pre import PreResidual as PreResidual
from .residual import Residual as Residual
from .residual import Sublayer as Sublayer
from .sandwich import SandwichResidual as SandwichResidual
