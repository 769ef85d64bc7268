"""Figures of matplotlib, which is optional. All plots get their figures here."""

from typing import TYPE_CHECKING, Any

from .errors import MissingPackageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["new_figure"]


def new_figure(**options: Any) -> "Figure":
    """Return an empty figure that draws into memory. It needs no display and does not change the user's backend.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # takes half a second
    except ImportError as error:
        raise MissingPackageError("a picture needs matplotlib; install it with: pip install matplotlib") from error
    return Figure(layout="constrained", **options)
