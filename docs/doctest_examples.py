"""For mkdocstrings: shows `>>>` examples of docstrings as code blocks. Markdown alone would show them as quotations."""

from typing import Any

from griffe import Extension, Object

__all__ = ["DoctestExamples"]


class DoctestExamples(Extension):
    """Fences every doctest example, from its first `>>>` to the next empty line."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Rewrite the docstring of one function, class or module; griffe calls this for each."""
        if obj.docstring is not None:
            obj.docstring.value = _fenced(obj.docstring.value)


def _fenced(text: str) -> str:
    lines: list[str] = []
    closing = ""
    for line in [*text.splitlines(), ""]:
        if not closing and line.lstrip().startswith(">>>"):
            indent = line[: len(line) - len(line.lstrip())]
            # An empty line before it: a fence may not follow a paragraph's text directly inside a list.
            lines += ["", f"{indent}```pycon"]
            closing = f"{indent}```"
        elif closing and not line.strip():
            lines.append(closing)
            closing = ""
        lines.append(line)
    return "\n".join(lines).rstrip()
