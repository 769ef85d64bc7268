"""Components for the length of a test. Used by the tests of what is built from names."""

from collections.abc import Iterator
from contextlib import contextmanager

from fuselayers.components import names, register
from fuselayers.components.registry import unregister

__all__ = ["registered"]


@contextmanager
def registered(kind: str, **components: type) -> Iterator[None]:
    """Let classes own the names they are given under, until the block ends."""
    try:
        for name, component in components.items():
            register(kind, name)(component)
        yield
    finally:
        for name in set(components).intersection(names(kind)):
            unregister(kind, name)
