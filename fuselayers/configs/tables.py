"""Tables of options, for the command line and the docs: from the components' signatures and the sections' schemas."""

import inspect
import re
from dataclasses import dataclass
from typing import Any, Final

from ..components import KINDS, REQUIRED, Option, names, options
from ..names import no_such
from .build import compose
from .schemas import SECTIONS, section_options

# The kinds and sections that have a table.
TABLES: Final = (*KINDS, *SECTIONS)


@dataclass(frozen=True)
class OptionRow:
    """A line of a table: one option, or a component without any.

    Attributes:
        name: of the component; of a section, the section.
        option: its name; "" for a component without options.
        type: as one writes it.
        range: what a number may be, in words; "" where nothing is said.
        default: as one writes it, or "required"; of a section, what the shipped files set.
        meaning: in words, with the unit.
    """

    name: str
    option: str
    type: str
    range: str
    default: str
    meaning: str


def option_rows(kind: str) -> list[OptionRow]:
    """Return the options of every component of a kind, or of a section of the config.

    Args:
        kind: one of `TABLES`.

    Raises:
        ValueError: there is no such kind or section.

    >>> [row.range for row in option_rows("feedforward") if row.option == "dropout"][0]
    'at least 0 and at most 1'
    """
    if kind not in TABLES:
        raise ValueError(no_such("kind", kind, TABLES))
    if kind in SECTIONS:
        shipped = getattr(compose(), kind)
        return [_row(kind, option, getattr(shipped, option.name)) for option in section_options(SECTIONS[kind])]
    rows = []
    for name in names(kind):
        known = [_row(name, option, option.default) for option in options(kind, name)]
        rows += known or [OptionRow(name, option="", type="", range="", default="", meaning="no options")]
    return rows


def type_name(annotation: Any) -> str:
    """A type as one writes it.

    >>> type_name(float), type_name(int | None), type_name(tuple[int, ...])
    ('float', 'int | None', 'tuple[int, ...]')
    """
    text = re.sub(r"[\w.]+\.(?=\w)", "", inspect.formatannotation(annotation))
    return re.sub(r"Optional\[(.*)\]", r"\1 | None", text)


def _row(name: str, option: Option, default: Any) -> OptionRow:
    return OptionRow(
        name=name,
        option=option.name,
        type=type_name(option.annotation),
        range=str(option.range or ""),
        default="required" if default is REQUIRED else repr(default),
        meaning=option.doc,
    )
