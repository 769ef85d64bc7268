"""What is said when something that was asked for does not work here and something else serves instead."""

import warnings


class FallbackWarning(UserWarning):
    """The backend that was asked for does not work here, and another one serves; said once per reason."""


_said: set[str] = set()


def say_once(text: str) -> None:
    """Warn with this text, unless it was said before in this process."""
    if text not in _said:
        _said.add(text)
        warnings.warn(text, FallbackWarning, stacklevel=3)
