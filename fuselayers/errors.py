"""Errors and warnings about backends and packages. Every package here uses them, so this file imports none of those."""

import warnings


class BackendUnavailableError(RuntimeError):
    """The requested backend does not work here, and no fallback is left."""


class FallbackWarning(UserWarning):
    """The requested backend does not work here and another one replaces it, or a call runs unfused.

    It is shown once per reason.
    """


class MissingPackageError(ImportError):
    """The call needs an optional package that is not installed."""


def in_one_line(error: BaseException) -> str:
    """Return the kind of an error and the first line of its text."""
    first_line, *_ = str(error).strip().split("\n")
    return f"{type(error).__name__}: {first_line}"


_warned: set[str] = set()


def warn_once(text: str) -> None:
    """Warn with this text, once per process."""
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, FallbackWarning, stacklevel=3)
