"""Converts docstrings, which use Markdown's code spans and indented code, to reStructuredText for autodoc."""

import re
from collections.abc import Iterator, Sequence
from typing import Final

__all__ = ["as_restructured_text"]

_HEADER: Final = re.compile(r"^\w+:$")
_COLUMNS: Final = re.compile(r"\S {3,}\S")
_CODE: Final = re.compile(r"(?P<before>\w?)(?P<fence>`+)(?P<code>[^`]+)(?P=fence)(?P<after>\w?)")
_NAME: Final = re.compile(r"[A-Za-z_][\w.]*")
# The markup of reStructuredText: stars and bars, except bullets, and an underscore at the end of a word.
_MARKUP: Final = re.compile(r"(?<=\S)\*|\*(?=\S)|\||(?<=\w)_(?!\w)")


def as_restructured_text(lines: Sequence[str]) -> list[str]:
    """Return a docstring's lines with code marked as reStructuredText wants it.

    Args:
        lines: of the docstring, without a common indent.

    Names in backticks become links where the reference has the name. Outside `Args:` and the like, a block that is
    indented or has columns becomes a literal block. Examples with `>>>` stay.

    >>> as_restructured_text(["Return `a * b` of `x`:", "", "x   [N]"])
    ['Return ``a * b`` of :py:obj:`x`:', '', '.. code-block:: text', '', '    x   [N]']
    """
    made: list[str] = []
    in_section = False
    for block in _blocks(lines):
        if block[0].lstrip().startswith(">>>"):
            made += block
        elif not in_section and (block[0].startswith("    ") or any(map(_COLUMNS.search, block))):
            made += [".. code-block:: text", "", *(f"    {line}" for line in block)]
        else:
            if not block[0].startswith(" "):
                in_section = _HEADER.match(block[0]) is not None and len(block) > 1
            made += _marked("\n".join(block)).split("\n")
        made.append("")
    return made[:-1]


def _blocks(lines: Sequence[str]) -> Iterator[list[str]]:
    """The runs of lines between empty lines."""
    block: list[str] = []
    for line in [*lines, ""]:
        if line.strip():
            block.append(line)
        elif block:
            yield block
            block = []


def _marked(text: str) -> str:
    made, end = "", 0
    for span in _CODE.finditer(text):
        code = re.sub(r"\s+", " ", span["code"])
        # With a leading dot Sphinx matches the end of a dotted name, such as `normalise.formula`.
        role = f":py:obj:`{'.' * ('.' in code)}{code}`" if _NAME.fullmatch(code) else f"``{code}``"
        before = f"{span['before']}\\ " if span["before"] else ""
        after = f"\\ {span['after']}" if span["after"] else ""
        made += _escaped(text[end : span.start()]) + before + role + after
        end = span.end()
    return made + _escaped(text[end:])


def _escaped(text: str) -> str:
    return _MARKUP.sub(r"\\\g<0>", text)
