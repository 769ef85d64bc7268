"""Replaces markers in the pages by tables that are made from the code, so that they stay true; Sphinx calls it.

<!-- options: feedforward -->   the options of a kind of component, or of a section of the config
<!-- keys: gpt2 -->             the names of a family's weights in `transformers` and here
<!-- models -->                 the shipped models
<!-- abilities -->              the inputs that each attention supports
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from fuselayers import components
from fuselayers.components import KINDS, get, names
from fuselayers.components.attention.inputs import ABILITIES, is_able
from fuselayers.configs import choices
from fuselayers.configs.group_files import SHIPPED
from fuselayers.configs.hugging_face import FAMILIES
from fuselayers.configs.tables import OptionRow, option_rows
from fuselayers.names import no_such

__all__ = ["filled"]

_MARKER: Final = re.compile(r"^<!-- (?P<table>\w+)(?:: (?P<of>\w+))? -->$", flags=re.MULTILINE)


def filled(markdown: str) -> str:
    """Return a page with a table in place of each marker.

    On the page of a kind, every table has the members in the order of the hand-written table, linked to their classes.

    Raises:
        ValueError: a marker names an unknown table, kind or family.
    """
    kind = next((marker["of"] for marker in _MARKER.finditer(markdown) if marker["of"] in KINDS), None)
    members = [] if kind is None else sorted(names(kind), key=lambda name: markdown.find(f"\n| `{name}` |"))

    def table(marker: re.Match[str]) -> str:
        name, of = marker["table"], marker["of"] or ""
        if name not in _TABLES:
            raise ValueError(f"{marker[0]}: {no_such('table', name, _TABLES)}")
        try:
            return _TABLES[name](of, members).rstrip()
        except ValueError as error:
            raise ValueError(f"{marker[0]}: {error}") from error

    made = _MARKER.sub(table, markdown)
    for name in members:
        made = made.replace(f"\n| `{name}` |", f"\n| {_linked(str(kind), name)} |")
    return made


def _linked(kind: str, name: str) -> str:
    title = get(kind, name).__name__
    # Components that other tests register have no page.
    return f"{{py:class}}`{name} <fuselayers.components.{title}>`" if hasattr(components, title) else f"`{name}`"


def _options(of: str, members: Sequence[str]) -> str:
    rows = option_rows(of)
    if of not in KINDS:
        return "\n".join(_option_lines(rows))
    parts = []
    for name in members:
        own = [row for row in rows if row.name == name and row.option]
        parts.append(f"### {_linked(of, name)}")
        parts.append("\n".join(_option_lines(own)) if own else "No options.")
    return "\n\n".join(parts)


def _option_lines(rows: Sequence[OptionRow]) -> Iterator[str]:
    yield "| option | type | default | meaning |"
    yield "| --- | --- | --- | --- |"
    for row in rows:
        type_and_range = f"{_code(row.type)}, {row.range}" if row.range else _code(row.type)
        meaning = row.meaning.replace("|", r"\|")
        yield f"| {_code(row.option)} | {type_and_range} | {_code(row.default)} | {meaning} |"


def _code(text: str) -> str:
    return "`" + text.replace("|", r"\|") + "`"


def _keys(name: str, _: Sequence[str]) -> str:
    if name not in FAMILIES:
        raise ValueError(no_such("family", name, FAMILIES))
    family = FAMILIES[name].weights
    lines = ["| theirs | ours |", "| --- | --- |"]
    for key in family.keys:
        notes = ["transposed"] * key.transposed + ["by head"] * key.by_head
        notes += [f"from row {key.first_row} on"] * (key.first_row > 0)
        lines.append(f"| `{key.theirs}` | {', '.join([f'`{key.ours}`', *notes])} |")
    placed = {key.theirs for key in family.keys}
    for theirs, repeated in family.repeated.items():
        where = ", where embeddings are tied" if theirs in placed else ""
        lines.append(f"| `{theirs}`{where} | left out, it has to equal `{repeated}` |")
    lines.extend(f"| `{_without_escapes(pattern)}` | left out |" for pattern in family.skipped)
    return "\n".join(lines)


def _without_escapes(pattern: str) -> str:
    return pattern.replace(r"\.", ".").replace(".*", "*")


def _abilities(_: str, members: Sequence[str]) -> str:
    lines = [f"| name | {' | '.join(f'`{ability}`' for ability in ABILITIES)} |", f"|{' --- |' * (1 + len(ABILITIES))}"]
    for name in members:
        lines.append(f"| `{name}` | {' | '.join('yes' if is_able(name, ability) else '' for ability in ABILITIES)} |")
    return "\n".join(lines)


def _models(_: str, __: Sequence[str]) -> str:
    lines = ["| name | what it is |", "| --- | --- |"]
    for name in choices("model"):
        comments = [
            line.removeprefix("# ")
            for line in (SHIPPED / "model" / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
            if line.startswith("# ") and "@package" not in line
        ]
        lines.append(f"| `{name}` | {' '.join(comments)} |")
    return "\n".join(lines)


_TABLES: Final[dict[str, Callable[[str, Sequence[str]], str]]] = {
    "options": _options,
    "keys": _keys,
    "models": _models,
    "abilities": _abilities,
}
