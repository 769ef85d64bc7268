"""A figure of matplotlib, which is not required: whatever draws takes its figure here."""

from typing import TYPE_CHECKING, Any

from .errors import MissingPackageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["new_figure"]


def new_figure(**options: Any) -> "Figure":
    """Return an empty figure that draws into memory: no display is needed, and the user's own backend is left alone.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # half a second
    except ImportError as error:
        raise MissingPackageError(
            "a picture needs matplotlib; install it with: pip install 'fuselayers[plots]'"
        ) from error
    return Figure(layout="constrained", **options)
