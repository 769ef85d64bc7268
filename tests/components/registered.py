"""Register components for the length of a test. Used by tests that build modules from names."""

from collections.abc import Iterator
from contextlib import contextmanager

from fuselayers.components import names, register
from fuselayers.components.registry import unregister

__all__ = ["registered"]


@contextmanager
def registered(kind: str, **components: type) -> Iterator[None]:
    """Register each class under the name of its argument until the block ends."""
    try:
        for name, component in components.items():
            register(kind, name)(component)
        yield
    finally:
        for name in set(components).intersection(names(kind)):
            unregister(kind, name)
