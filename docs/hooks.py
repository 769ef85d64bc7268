"""For mkdocs: replaces markers in the pages by tables that are made from the code, so that they stay true.

<!-- options: feedforward -->   the options of a kind of component, or of a section of the config
<!-- keys: gpt2 -->             the names of a family's weights in `transformers` and here
<!-- models -->                 the shipped models
<!-- abilities -->              the inputs that each attention supports
"""

import re
from collections.abc import Callable
from typing import Any, Final

from fuselayers.components import names
from fuselayers.components.attention.inputs import ABILITIES, is_able
from fuselayers.configs import choices
from fuselayers.configs.group_files import SHIPPED
from fuselayers.configs.hugging_face import FAMILIES
from fuselayers.configs.tables import option_table
from fuselayers.names import no_such

__all__ = ["filled", "on_page_markdown"]

_MARKER: Final = re.compile(r"^<!-- (?P<table>\w+)(?:: (?P<of>\w+))? -->$", flags=re.MULTILINE)


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Return a page with its markers replaced; mkdocs calls this for each page."""
    return filled(markdown)


def filled(markdown: str) -> str:
    """Return a page with a table in place of each marker.

    Raises:
        ValueError: a marker names an unknown table, kind or family.
    """
    return _MARKER.sub(_table, markdown)


def _table(marker: re.Match[str]) -> str:
    table, of = marker["table"], marker["of"] or ""
    if table not in _TABLES:
        raise ValueError(f"{marker[0]}: {no_such('table', table, _TABLES)}")
    try:
        return _TABLES[table](of).rstrip()
    except ValueError as error:
        raise ValueError(f"{marker[0]}: {error}") from error


def _keys(name: str) -> str:
    if name not in FAMILIES:
        raise ValueError(no_such("family", name, FAMILIES))
    family = FAMILIES[name]
    lines = ["| theirs | ours |", "| --- | --- |"]
    for key in family.keys:
        lines.append(f"| `{key.theirs}` | `{key.ours}`{', transposed' if key.transposed else ''} |")
    placed = {key.theirs for key in family.keys}
    for theirs, repeated in family.repeated.items():
        where = ", where embeddings are tied" if theirs in placed else ""
        lines.append(f"| `{theirs}`{where} | left out, it has to equal `{repeated}` |")
    lines.extend(f"| `{_without_escapes(pattern)}` | left out |" for pattern in family.skipped)
    return "\n".join(lines)


def _without_escapes(pattern: str) -> str:
    return pattern.replace(r"\.", ".").replace(".*", "*")


def _abilities(_: str) -> str:
    lines = [f"| name | {' | '.join(f'`{ability}`' for ability in ABILITIES)} |", f"|{' --- |' * (1 + len(ABILITIES))}"]
    for name in names("attention"):
        lines.append(f"| `{name}` | {' | '.join('yes' if is_able(name, ability) else '' for ability in ABILITIES)} |")
    return "\n".join(lines)


def _models(_: str) -> str:
    lines = ["| name | what it is |", "| --- | --- |"]
    for name in choices("model"):
        comments = [
            line.removeprefix("# ")
            for line in (SHIPPED / "model" / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
            if line.startswith("# ") and "@package" not in line
        ]
        lines.append(f"| `{name}` | {' '.join(comments)} |")
    return "\n".join(lines)


_TABLES: Final[dict[str, Callable[[str], str]]] = {
    "options": option_table,
    "keys": _keys,
    "models": _models,
    "abilities": _abilities,
}
