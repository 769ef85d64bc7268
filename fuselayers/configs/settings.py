"""A section's fields: what each means and may be. Used by every dataclass in schemas.py.

The type and the range of a number stand in the field's annotation, as those of a component's options do.
"""

import re
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, get_type_hints

from ..components.ranges import Range, range_of
from .annotations import checked

__all__ = ["Setting", "check_settings", "setting", "settings_of"]


@dataclass(frozen=True)
class Setting:
    """What a field means: its text, its unit, its type, and what a number or a text may be.

    Attributes:
        doc: the meaning, in words.
        unit: what a number counts or measures; "" for a pure number and for what is no number.
        annotation: the type, without the range.
        range: the bounds of a number.
        pattern: what a text must fit as a whole, as a regular expression.
    """

    doc: str
    unit: str = ""
    annotation: Any = None
    range: Range | None = None
    pattern: str | None = None


def setting(doc: str, *, unit: str = "", default: Any = MISSING, pattern: str | None = None) -> Any:
    """Return a dataclass field that `check_settings` can check."""
    return field(default=default, metadata={"setting": Setting(doc, unit=unit, pattern=pattern)})


def settings_of(section: type) -> dict[str, Setting]:
    """Return field -> what it means and may be.

    >>> from fuselayers.configs import TrainConfig
    >>> steps = settings_of(TrainConfig)["steps"]
    >>> steps.doc, steps.unit, str(steps.range)
    ('updates of the weights', 'steps', 'at least 1')
    """
    types, annotations = get_type_hints(section), get_type_hints(section, include_extras=True)
    return {
        entry.name: replace(
            entry.metadata["setting"], annotation=types[entry.name], range=range_of(annotations[entry.name])
        )
        for entry in fields(section)
    }


def check_settings(name: str, section: Any) -> None:
    """Check every field of a frozen section by its annotation and its `setting`; called from `__post_init__`.

    A whole number where a number is wanted becomes a float, and a list a tuple.

    Raises:
        ValueError: names the field, what it may be, and what came.
    """
    for option, about in settings_of(type(section)).items():
        where = f"{name}.{option}"
        value = checked(where, getattr(section, option), about.annotation)
        if about.range is not None and value is not None:
            about.range.check(where, value)
        if about.pattern is not None and not re.fullmatch(about.pattern, value):
            raise ValueError(f"{where} must be {about.doc}, got {value!r}")
        object.__setattr__(section, option, value)
