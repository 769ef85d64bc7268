"""Plain values: what a config may hold, how YAML is read, and how a value is checked against an annotation.

A config may come from a stranger, so nothing in it runs: no tags, no import paths, no resolvers.
"""

import io
import math
import re
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, Union, get_args, get_origin

import yaml
from omegaconf import Container, OmegaConf

from ..components import Choice, Option, get
from ..names import no_such, shown

# One whole value that names another option: no text around it, no resolver, no nesting.
_REFERENCE: Final = re.compile(r"\$\{([a-z]\w*(?:\.\w+)+)\}")
_NO_RESOLVERS: Final = (
    "${...} may only stand alone and name another value, as ${model.dropout}; resolvers such as ${oc.env:...} are not "
    "run. In an application of your own, call OmegaConf.resolve(cfg) first"
)
_QUOTED: Final = re.compile(r"'.*'|\".*\"", flags=re.DOTALL)
_LONGEST_KEY: Final = 80
_INTEGERS_BELOW: Final = 2**63  # torch's sizes
_MOST_BYTES: Final = 100_000
_MOST_VALUES: Final = 10_000
_DEEPEST_YAML: Final = 20
_DEEPEST: Final = 8


def read_yaml(path: Path) -> Any:
    """Return what a YAML file holds, as plain dicts, lists and scalars; as Hydra reads it, but more strictly.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is too large, no UTF-8 text or no YAML, or it uses tags or anchors.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise type(error)(f"cannot read the config file {path}: {error.strerror}") from error
    return parse_yaml(content, str(path))


def parse_yaml(content: bytes, source: str) -> Any:
    """Return what YAML holds, as `read_yaml` does; errors name the `source`.

    Raises:
        ValueError: it is too large, no UTF-8 text or no YAML, or it uses tags or anchors.
    """
    # The file may be none of ours, and secret. No text here quotes it, but for a duplicate key; so no error may chain
    # the one that it came from. Later checks quote keys, and the value of a known key: 80 characters at most.
    try:
        if len(content) > _MOST_BYTES:
            raise ValueError(f"a config file may have {_MOST_BYTES:,} bytes at most; no config is larger")
        return _parsed(content.decode("utf-8"))
    except UnicodeDecodeError:
        raise ValueError(f"{source}: a config file must be UTF-8 text") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        problem = _QUOTED.sub("...", getattr(error, "problem", None) or "a character that is not allowed")
        start, duplicate, key = problem.partition("found duplicate key ")
        problem = f"{start}{duplicate}{shown(key)}" if duplicate else problem
        raise ValueError(f"{source}: not YAML{line}: {problem}") from None
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def _parsed(text: str) -> Any:
    # The events come before anything is built: an anchor could otherwise grow a few lines into gigabytes.
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        assert event.start_mark is not None
        line = f"line {event.start_mark.line + 1}"
        tag, anchor = getattr(event, "tag", None), getattr(event, "anchor", None)
        if tag is not None:
            raise ValueError(f"YAML tags are refused, got one in {line}: a config holds plain values")
        if anchor is not None:
            raise ValueError(f"YAML anchors are refused, got one in {line}: write the value out")
        if isinstance(event, yaml.ScalarEvent) and not depth:  # OmegaConf would take text for a key
            raise ValueError("a config must be a mapping of groups, got a single value")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST_YAML:
            raise ValueError(f"{line} is nested deeper than {_DEEPEST_YAML} levels; no config is")
        if isinstance(event, yaml.ScalarEvent) and _is_refused(event.value):  # before OmegaConf parses it
            raise ValueError(f"{line}: {_NO_RESOLVERS}")
    return OmegaConf.to_container(OmegaConf.load(io.StringIO(text)), resolve=False)


def plain_copy(value: Any, where: str = "") -> Any:
    """Return a copy made of dict, list, str, int, float, bool and None alone.

    Args:
        value: mappings (omegaconf's too), sequences, choices and scalars.
        where: the path of the value, for error texts: "model.position".

    Raises:
        ValueError: the value could run code (`_target_`, a resolver), has another type, is nested too deeply or holds
            too much.

    >>> plain_copy({"suffixes": (".py",)})
    {'suffixes': ['.py']}
    >>> plain_copy({"_target_": "os.system"})
    Traceback (most recent call last):
    ValueError: '_target_' is refused: a config names registered components, it cannot call code
    """
    return _copy(value, where, depth=0, left=[_MOST_VALUES])


def _copy(value: Any, where: str, *, depth: int, left: list[int]) -> Any:
    left[0] -= 1
    if depth > _DEEPEST:
        raise ValueError(f"{where} is nested deeper than {_DEEPEST} levels; no config is")
    if left[0] < 0:
        raise ValueError(f"the config is larger than {_MOST_VALUES:,} values; no config is")
    if isinstance(value, Container):
        value = OmegaConf.to_container(value, resolve=False)
    if isinstance(value, Choice):
        value = {"name": value.name, **value.options}
    if isinstance(value, Mapping):
        return {
            _key(key, where): _copy(entry, f"{where}.{key}" if where else str(key), depth=depth + 1, left=left)
            for key, entry in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_copy(entry, f"{where}[{index}]", depth=depth + 1, left=left) for index, entry in enumerate(value)]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        if _is_refused(value):
            raise ValueError(f"{where or 'a value'}={shown(str(value))} is refused: {_NO_RESOLVERS}")
        return str(value)
    for number in (int, float):
        if isinstance(value, number):
            return number(value)
    raise ValueError(
        f"{where or 'the config'} must be text, a number, true, false, null, a list or a mapping, "
        f"got a {type(value).__name__}"
    )


def in_a_word(content: Any) -> str:
    """Return the kind of a value whose text an error shall not show.

    >>> in_a_word("root:x:0:0"), in_a_word(None)
    ('a str', 'nothing')
    """
    return "nothing" if content is None else f"a {type(content).__name__}"


def _is_refused(text: str) -> bool:
    return "${" in text and not _REFERENCE.fullmatch(text)


def _key(key: Any, where: str) -> str:
    if not isinstance(key, str):
        raise ValueError(f"the keys of {where or 'a config'} must be text, got {shown(key)}")
    if len(key) > _LONGEST_KEY:
        raise ValueError(f"no name in a config is longer than {_LONGEST_KEY} characters, got {shown(key)}")
    if key.startswith("_"):
        path = f"{where}.{key}" if where else key
        raise ValueError(f"{shown(path)} is refused: a config names registered components, it cannot call code")
    if key == "hydra" and not where:
        raise ValueError(
            "'hydra' is refused: Hydra only composes here, its own settings are not part of a config; "
            "an override names folders of your own, hydra.searchpath=[/my/configs]"
        )
    return str(key)


def resolved(sections: dict[str, Any]) -> dict[str, Any]:
    """Return the sections with every `${section.option}` replaced by the value of that option.

    Raises:
        ValueError: a reference names nothing, a whole section or list, or itself.

    >>> resolved({"model": {"dropout": 0.1}, "feedforward": {"dropout": "${model.dropout}"}})
    {'model': {'dropout': 0.1}, 'feedforward': {'dropout': 0.1}}
    """
    return {name: _resolved(section, name, sections) for name, section in sections.items()}


def _resolved(value: Any, where: str, sections: dict[str, Any]) -> Any:
    if isinstance(value, dict):
        return {key: _resolved(entry, f"{where}.{key}", sections) for key, entry in value.items()}
    if isinstance(value, list):
        return [_resolved(entry, f"{where}[{index}]", sections) for index, entry in enumerate(value)]
    seen: list[str] = []
    while isinstance(value, str) and (reference := _REFERENCE.fullmatch(value)):
        if value in seen:
            raise ValueError(f"{where} refers to itself, through {' -> '.join(seen)}; give it a value")
        seen.append(value)
        found: Any = sections
        for key in reference[1].split("."):
            if not isinstance(found, dict) or key not in found:
                raise ValueError(f"{where} refers to {value}, which this config does not have")
            found = found[key]
        # OmegaConf would take lists too, and a list of references to lists of references grows without bound.
        if isinstance(found, (dict, list)):
            raise ValueError(f"{where} refers to {value}, which is no single value")
        value = found
    return value


def checked(where: str, value: Any, annotation: Any) -> Any:
    """Return the value as the annotation has it: an int as a float where a float is wanted, a list as a tuple.

    Args:
        where: the path of the value, for the error text: "feedforward.expansion".
        value: a plain value.
        annotation: bool, int, float, str, None, Literal, a tuple of any length, or a union of these. The component
            checks a value of any other type itself.

    Raises:
        ValueError: the value does not fit.

    >>> checked("feedforward.expansion", 4, float)
    4.0
    >>> checked("feedforward.expansion", "four", float)
    Traceback (most recent call last):
    ValueError: feedforward.expansion must be a number, got 'four'
    """
    wanted = alternatives(annotation)
    for alternative in wanted:
        fits, fitted = _fit(where, value, alternative)
        if fits:
            return fitted
    literals = [name for alternative in wanted if get_origin(alternative) is Literal for name in get_args(alternative)]
    if literals and isinstance(value, str):
        raise ValueError(no_such(where, value, literals))
    hint = ""
    if str in wanted and isinstance(value, (bool, int, float)):
        hint = "; quote it to make it text, with two pairs of quotes on a command line"
    elif isinstance(value, str) and any(map(_is_any_length, wanted)):
        hint = f"; write [{value}]"
    raise ValueError(f"{where} must be {' or '.join(map(_in_words, wanted))}, got {shown(value)}{hint}")


def checked_option(where: str, value: Any, option: Option) -> Any:
    """Return the value of an option, checked by its annotation and its range.

    Raises:
        ValueError: the value has another type, is out of range, or names no registered component.
    """
    value = checked(where, value, option.annotation)
    if isinstance(value, int) and abs(value) >= _INTEGERS_BELOW:
        raise ValueError(f"{where} must be below 2**63, got {shown(value)}")
    if option.range is not None and value is not None:
        option.range.check(where, value)
    if option.kind is not None and isinstance(value, str):
        get(option.kind, value)
    return value


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union; for any other annotation, the annotation alone."""
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _fit(where: str, value: Any, annotation: Any) -> tuple[bool, Any]:
    """Return whether the value fits, and the converted value."""
    if annotation in (None, type(None)):
        return value is None, value
    if get_origin(annotation) is Literal:
        return any(type(value) is type(name) and value == name for name in get_args(annotation)), value
    if _is_any_length(annotation):
        if not isinstance(value, (list, tuple)):
            return False, value
        entry, _ = get_args(annotation)
        return True, tuple(checked(f"{where}[{index}]", item, entry) for index, item in enumerate(value))
    if annotation is float:
        number = _number(value)
        return number is not None, number
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool), value
    return annotation not in (bool, str) or isinstance(value, annotation), value


def _is_any_length(annotation: Any) -> bool:
    return get_origin(annotation) is tuple and get_args(annotation)[1:] == (Ellipsis,)


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _in_words(annotation: Any) -> str:
    if annotation in (None, type(None)):
        return "null"
    if get_origin(annotation) is Literal:
        return f"one of {', '.join(map(str, get_args(annotation)))}"
    if _is_any_length(annotation):
        return "a list"
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    return words[annotation]
