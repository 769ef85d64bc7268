"""Triton, or a stand-in where it is not installed, so that files with kernels can be imported.

Triton has no wheel for macOS and Windows. There every op runs in plain torch and calls no kernel.
"""

from collections.abc import Callable
from typing import Any, Final


class _Absent:
    """Stands in for a module: as a decorator it returns the function, any attribute is this object."""

    def __getattr__(self, name: str) -> "_Absent":
        return self

    def __call__(self, fn: Any = None, **options: Any) -> Any:
        return self if fn is None else fn


__all__ = ["HAS_TRITON", "libdevice", "tile_function", "tl", "triton"]

try:
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice
except ImportError:
    triton = tl = libdevice = _Absent()

HAS_TRITON: Final = not isinstance(triton, _Absent)


def tile_function(fn: Callable[..., Any]) -> Any:
    """Decorate a function of tiles, which kernels call."""
    return triton.jit(fn)
