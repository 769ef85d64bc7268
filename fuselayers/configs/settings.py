"""A section's fields: what each means and may be. Used by every dataclass in schemas.py."""

import operator
import re
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, get_type_hints

from .annotations import checked

__all__ = ["Setting", "check_settings", "setting", "settings_of"]


@dataclass(frozen=True)
class Setting:
    """What a field means, and its bounds: a number within them, or a text that the pattern fits as a whole."""

    doc: str
    minimum: float | None = None
    above: float | None = None
    below: float | None = None
    pattern: str | None = None


def setting(
    doc: str,
    *,
    default: Any = MISSING,
    minimum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    pattern: str | None = None,
) -> Any:
    """Return a dataclass field that `check_settings` can check."""
    about = Setting(doc, minimum=minimum, above=above, below=below, pattern=pattern)
    return field(default=default, metadata={"setting": about})


def settings_of(section: type) -> dict[str, Setting]:
    """Return field -> what it means and may be.

    >>> from fuselayers.configs import TrainConfig
    >>> settings_of(TrainConfig)["steps"].doc
    'updates of the weights'
    """
    return {entry.name: entry.metadata["setting"] for entry in fields(section)}


def check_settings(name: str, section: Any) -> None:
    """Check every field of a frozen section by its annotation and its `setting`; called from `__post_init__`.

    A whole number where a number is wanted becomes a float, and a list a tuple.

    Raises:
        ValueError: names the field, what it may be, and what came.
    """
    annotations = get_type_hints(type(section))
    for option, about in settings_of(type(section)).items():
        where = f"{name}.{option}"
        value = checked(where, getattr(section, option), annotations[option])
        _check_bounds(where, value, about)
        object.__setattr__(section, option, value)


def _check_bounds(where: str, value: Any, about: Setting) -> None:
    bounds = [
        (about.minimum, "at least", operator.ge),
        (about.above, "above", operator.gt),
        (about.below, "below", operator.lt),
    ]
    stated = [(bound, words, fits) for bound, words, fits in bounds if bound is not None]
    if not all(fits(value, bound) for bound, _, fits in stated):
        wanted = " and ".join(f"{words} {bound}" for bound, words, _ in stated)
        raise ValueError(f"{where} must be {wanted}, got {value}")
    if about.pattern is not None and not re.fullmatch(about.pattern, value):
        raise ValueError(f"{where} must be {about.doc}, got {value!r}")
