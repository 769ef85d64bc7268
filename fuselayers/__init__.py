"""Fused transformer layers for PyTorch: build them from config, swap them, or import them."""

from . import components as components
from . import configs as configs
from . import ops as ops
from . import partition as partition
from ._version import __version__ as __version__
from .configs import build as build
from .configs import from_pretrained as from_pretrained
from .configs import rebuild as rebuild
from .partition import backends as backends
from .partition import explain as explain
from .partition import fuse as fuse
from .partition import memory_efficient_fusion as memory_efficient_fusion
