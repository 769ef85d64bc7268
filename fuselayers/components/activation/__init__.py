"""Activations as modules."""

from .activations import GELU as GELU
from .activations import Activation as Activation
from .activations import GELUTanh as GELUTanh
from .activations import LeakyReLU as LeakyReLU
from .activations import ReLU as ReLU
from .activations import Sigmoid as Sigmoid
from .activations import SiLU as SiLU
from .activations import SmeLU as SmeLU
from .activations import SquaredReLU as SquaredReLU
from .activations import StarReLU as StarReLU
