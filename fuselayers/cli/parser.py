"""The parser of the command line: its help texts and its errors. Used by every command.

It does not import torch, so that `--help` and `--version` are fast.
"""

import argparse
import itertools
import re
from typing import Any, Final, NoReturn

from ..names import no_such
from ..text_table import wrapped

_WIDEST_TERM: Final = 52  # columns; beside a wider one there is no room for the meaning


class _Help(argparse.RawDescriptionHelpFormatter):
    """Fills the paragraphs of a description, and wraps its indented lines, which are a term and its meaning."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines: list[str] = []
        for keeps_lines, group in itertools.groupby(text.splitlines(), key=lambda line: not line or line[0] == " "):
            for line in group if keeps_lines else [" ".join(group)]:
                term = re.match(r" +\S.*? {3,}(?=\S)", line)
                beside = term is not None and term.end() <= _WIDEST_TERM
                lines += wrapped(line, width, indent=term.end() - 2 if term and beside else 4 * keeps_lines)
        return "\n".join(lines)


class Parser(argparse.ArgumentParser):
    """Leaves help texts as they are written, and raises its errors as ValueError."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=_Help, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, but refuse unknown arguments here, so that the error names the command."""
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


def add_imports(parser: argparse.ArgumentParser) -> None:
    """Add `--import`, for the commands that build a config: the config may name a class of the user."""
    parser.add_argument(
        "--import",
        dest="imports",
        metavar="MODULE",
        action="append",
        default=[],
        help="import this module first, and offer the components that it registers; may be repeated",
    )


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add `--device`."""
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default auto: a GPU when there is one)")
