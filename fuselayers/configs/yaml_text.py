"""Text to plain values and back, as YAML 1.2 reads it: `off` is text, `1e-3` a number, `12:30` and a date are text."""

import re
from pathlib import Path
from typing import Any, Final

import yaml

__all__ = ["dump", "parse", "read", "scalar"]

_MOST_BYTES: Final = 100_000
_DEEPEST: Final = 20

_CORE_SCHEMA: Final = (
    ("null", r"~|null|Null|NULL|", ("~", "n", "N", "")),
    ("bool", r"true|True|TRUE|false|False|FALSE", tuple("tTfF")),
    ("int", r"[-+]?[0-9]+", tuple("-+0123456789")),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        tuple("-+.0123456789"),
    ),
)
_NUMBER: Final = re.compile("|".join(pattern for tag, pattern, _ in _CORE_SCHEMA if tag in ("int", "float")))


class _Loader(yaml.SafeLoader):
    """YAML 1.2's core schema, plain values only."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (PyYAML's own way)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise ValueError(f"{key.value!r} stands twice in one mapping, line {key.start_mark.line + 1}")
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    """Quotes text that either version of YAML would read as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, _pattern, _first in _CORE_SCHEMA:
    for _class in (_Loader, _Dumper):
        # `int` comes before `float`, whose pattern fits it too.
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), list(_first))


# SafeLoader's own takes a leading zero for octal, as YAML 1.1 did.
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value))


def read(path: Path) -> Any:
    """Return what a YAML file holds.

    Raises:
        OSError: it cannot be read.
        ValueError: as `parse`, with the file's name; or it is too large, or not UTF-8 text.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise type(error)(f"cannot read the config file {path}: {error.strerror}") from error
    # Before it is decoded: what is cut off may end within a letter, or read as another config.
    if len(content) > _MOST_BYTES:
        raise ValueError(f"{path}: a config file may have {_MOST_BYTES:,} bytes at most; no config is larger")
    try:
        return parse(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: a config file must be UTF-8 text") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def parse(text: str) -> Any:
    """Return what YAML text holds.

    Raises:
        ValueError: it is no YAML, or uses what a config has no need of: tags, anchors, several documents.

    >>> parse("fusion: off")
    {'fusion': 'off'}
    """
    try:
        _refuse_all_but_values(text)
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        raise ValueError(f"not YAML{line}: {problem}") from error


def scalar(text: str) -> int | float | str:
    """Return a text without quotes as the number that it is in YAML, or as it came.

    >>> scalar("007"), scalar("07.5"), scalar("0x10")
    (7, 7.5, '0x10')
    """
    number: int | float | str = yaml.load(text, Loader=_Loader) if _NUMBER.fullmatch(text) else text
    return number


def dump(value: Any) -> str:
    """Return plain values as YAML that `parse`, and any other reader of YAML, reads as the same values.

    >>> print(dump({"path": "off", "rate": 1e-5, "suffixes": [".py"]}), end="")
    path: 'off'
    rate: 1.0e-05
    suffixes:
    - .py
    """
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=1000)


def _refuse_all_but_values(text: str) -> None:
    """Look at the text's events, before anything is built from them."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        assert event.start_mark is not None
        line = f"line {event.start_mark.line + 1}"
        tag, anchor = getattr(event, "tag", None), getattr(event, "anchor", None)
        if tag is not None:
            raise ValueError(f"YAML tags are refused, got {tag!r} in {line}: a config holds plain values")
        if anchor is not None:
            raise ValueError(f"YAML anchors are refused, got {anchor!r} in {line}: write the value out")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            raise ValueError(f"{line} is nested deeper than {_DEEPEST} levels; no config is")
