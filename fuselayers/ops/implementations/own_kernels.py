"""own_kernels -- whether a compiled graph takes the ops' kernels or their formulas.

`dispatch` reads it, and `fuse(backend="triton")` sets it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

_own_kernels: Final = ContextVar("own_kernels", default=False)


def takes_own_kernels() -> bool:
    """True while a graph is compiled in which the ops run this library's kernels."""
    return _own_kernels.get()


@contextmanager
def own_kernels() -> Iterator[None]:
    """Let every graph that is compiled inside this context take the kernels."""
    before = _own_kernels.set(True)
    try:
        yield
    finally:
        _own_kernels.reset(before)
