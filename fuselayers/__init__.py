"""Fused transformer layers for PyTorch: build them from config, swap them, or import them."""

import importlib
from typing import TYPE_CHECKING, Any

from ._version import __version__ as __version__
from .other_names import missing_attribute as _missing_attribute

# Note: [imported when used] Importing torch takes two seconds. `fuselayers --version` and a typo on the command line do
# not need it, so a package is imported when one of its names is first looked up.
if TYPE_CHECKING:
    from . import components as components
    from . import configs as configs
    from . import ops as ops
    from . import partition as partition
    from .components.swap import swap as swap
    from .components.swap import unswap as unswap
    from .configs.build import build as build
    from .configs.from_pretrained import from_pretrained as from_pretrained
    from .configs.rebuild import rebuild as rebuild
    from .partition import backends as backends
    from .partition import explain as explain
    from .partition import fuse as fuse
    from .partition import memory_efficient_fusion as memory_efficient_fusion

__all__ = [
    "__version__",
    "backends",
    "build",
    "components",
    "configs",
    "explain",
    "from_pretrained",
    "fuse",
    "memory_efficient_fusion",
    "ops",
    "partition",
    "rebuild",
    "swap",
    "unswap",
]
_HOMES = {
    "backends": "partition",
    "build": "configs",
    "explain": "partition",
    "from_pretrained": "configs",
    "fuse": "partition",
    "memory_efficient_fusion": "partition",
    "rebuild": "configs",
    "swap": "components.swap",
    "unswap": "components.swap",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        _missing_attribute(name)
    module = importlib.import_module(f".{_HOMES.get(name, name)}", __name__)
    value = globals()[name] = getattr(module, name) if name in _HOMES else module
    return value


def __dir__() -> list[str]:
    return list(__all__)
