"""Tables of options from the components' signatures and the sections' schemas, for the command line and the docs."""

import inspect
import re
from dataclasses import dataclass
from typing import Any, Final

from ..components import KINDS, REQUIRED, Option, names, options
from ..components.option import described
from ..names import no_such
from .build import compose
from .sections import SECTIONS

# The kinds and sections that have a table.
TABLES: Final = (*KINDS, *SECTIONS)


@dataclass(frozen=True)
class OptionRow:
    """A row of a table, as text: one option, or a component without options, whose `option` is ""."""

    name: str
    option: str = ""
    type: str = ""
    range: str = ""
    default: str = ""
    meaning: str = "no options"


def option_rows(kind: str) -> list[OptionRow]:
    """Return the options of every component of a kind, or of a config section with the values of the shipped files.

    Raises:
        ValueError: `kind` is not in `TABLES`.

    >>> [row.range for row in option_rows("feedforward") if row.option == "dropout"][0]
    'at least 0 and at most 1'
    """
    if kind not in TABLES:
        raise ValueError(no_such("kind", kind, TABLES))
    if kind in SECTIONS:
        shipped = getattr(compose(), kind)
        return [_row(kind, option, getattr(shipped, option.name)) for option in described(SECTIONS[kind]).values()]
    rows = []
    for name in names(kind):
        rows += [_row(name, option, option.default) for option in options(kind, name)] or [OptionRow(name)]
    return rows


def _row(name: str, option: Option, default: Any) -> OptionRow:
    # Write float | None instead of Optional[builtins.float].
    text = re.sub(r"[\w.]+\.(?=\w)", "", inspect.formatannotation(option.annotation))
    return OptionRow(
        name=name,
        option=option.name,
        type=re.sub(r"Optional\[(.*)\]", r"\1 | None", text),
        range=str(option.range or ""),
        default="required" if default is REQUIRED else repr(default),
        meaning=option.doc,
    )
