"""The parser of the command line: its help texts, its errors, and what the Tab key offers. Used by every command.

It imports nothing that imports torch, for `--help`, `--version` and the Tab key.
"""

import argparse
import re
import textwrap
from collections.abc import Iterable
from typing import Any, NoReturn

from ..names import no_such

_GAP = re.compile(r"\S( {2,})\S")


class Parser(argparse.ArgumentParser):
    """Folds help texts at the terminal's width, and raises its errors as ValueError."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=_HelpFormatter, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's, but a command refuses an unknown argument itself, so that the error names the command."""
        parsed, unknown = super().parse_known_args(args, namespace)
        for argument in unknown:
            if argument.startswith("-"):
                options = [name for name in self._option_string_actions if name.startswith("--")]
                raise ValueError(no_such(f"option of {self.prog}", argument.partition("=")[0], options))
            self.error(f"unrecognized arguments: {argument}")
        return parsed, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        kind = str(action.metavar).lower() if action.metavar else action.option_strings[0].lstrip("-")
        _, _, command = self.prog.partition(" ")
        of_command = f" of {command}" if command and isinstance(action, argparse._SubParsersAction) else ""
        raise ValueError(no_such(f"{kind}{of_command}", value, action.choices))

    def error(self, message: str) -> NoReturn:
        """Raise argparse's error."""
        raise ValueError(f"{message}; see {self.prog} --help")


class _HelpFormatter(argparse.HelpFormatter):
    """Fills paragraphs at the terminal's width. An indented line stays one, folded below its second column."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(filled(text, width))


def filled(text: str, width: int) -> list[str]:
    """Return the lines of a text, folded between words at a width.

    Lines without an indent that follow each other are one paragraph. An indented line is folded by itself, below what
    follows its first gap of two spaces, if any.

    >>> filled("A paragraph\\nin two lines.\\n\\n  one       a line that is long", 24)
    ['A paragraph in two', 'lines.', '', '  one       a line that', '            is long']
    """
    lines: list[str] = []
    paragraph: list[str] = []
    for line in [*text.splitlines(), ""]:
        if line and not line.startswith(" "):
            paragraph.append(line)
            continue
        lines += folded(" ".join(paragraph), width)
        paragraph = []
        gap = _GAP.search(line.lstrip())
        indent = len(line) - len(line.lstrip())
        lines += folded(line, width, hanging=indent + (gap.end(1) if gap else 4)) or [""]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def folded(text: str, width: int | None, *, hanging: int = 0) -> list[str]:
    """Return a text as lines of at most `width` characters, broken between words only; as one line where it is None.

    >>> folded("name    a long meaning", 15, hanging=8)
    ['name    a long', '        meaning']
    """
    if width is None:
        return [text]
    # A hanging indent that leaves no room for words is none.
    hanging = hanging if hanging <= width // 2 else 4
    return textwrap.wrap(
        text, max(width, 20), subsequent_indent=" " * hanging, break_long_words=False, break_on_hyphens=False
    )


def add_overrides(parser: argparse.ArgumentParser, *, nargs: str, metavar: str, help: str) -> None:
    """Add the overrides of a config, and let the Tab key complete them."""
    action = parser.add_argument("overrides", nargs=nargs, default=[], metavar=metavar, help=help)
    action.completer = complete_override  # type: ignore[attr-defined]


def add_imports(parser: argparse.ArgumentParser) -> None:
    """Add `--import`, for the commands that build a config, which may name a class of the user."""
    parser.add_argument(
        "--import",
        dest="imports",
        metavar="MODULE",
        action="append",
        default=[],
        help="import this module first: the components that it registers can be chosen; may be repeated",
    )


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add `--device`."""
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default auto: a GPU when there is one)")


def complete_override(prefix: str, **_: object) -> Iterable[str]:
    """Return what begins with a prefix: groups and models, the choices of a group, or a section's options."""
    from ..configs import GROUPS, choices
    from ..configs.tables import option_rows

    group, equals, _name = prefix.partition("=")
    section, dot, _option = prefix.partition(".")
    if equals:
        found = [f"{group}={name}" for name in choices(group)] if group in GROUPS else []
    elif dot:
        found = [f"{section}.{row.option}=" for row in option_rows(section) if row.option] if section in GROUPS else []
    else:
        found = [*(f"{group}=" for group in GROUPS), *choices("model")]
    return [text for text in dict.fromkeys(found) if text.startswith(prefix)]
