"""FallbackWarning -- the requested backend does not work here, and another one replaces it."""

import warnings


class FallbackWarning(UserWarning):
    """The requested backend does not work here, and another one replaces it. It is shown once per reason."""


_said: set[str] = set()


def say_once(text: str) -> None:
    """Warn with this text, once per process."""
    if text not in _said:
        _said.add(text)
        warnings.warn(text, FallbackWarning, stacklevel=3)
