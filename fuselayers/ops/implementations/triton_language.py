"""Triton where there is one, and a stand-in where there is none, so that the files that hold kernels can be imported.

Triton has no wheel for macOS and Windows. There every op runs in plain torch, and none of its kernels is ever called.
"""

from collections.abc import Callable
from typing import Any, Final

__all__ = ["HAS_TRITON", "libdevice", "tile_function", "tl", "triton"]


class _Absent:
    """Takes the place of a module: a decorator of it returns the function, a type of it is this object again."""

    def __getattr__(self, name: str) -> "_Absent":
        return self

    def __call__(self, fn: Any = None, **options: Any) -> Any:
        return self if fn is None else fn


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
