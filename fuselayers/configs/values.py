"""The plain values that a caller's config may hold, and the reading of YAML.

A config may come from a stranger, so nothing in it runs: no tags, no import paths, no resolvers.
"""

import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml
from omegaconf import Container, OmegaConf

from ..components import Choice
from ..names import shown

# A whole value that names another option, without other text, resolvers or nesting.
REFERENCE: Final = re.compile(r"\$\{([a-z]\w*(?:\.\w+)+)\}")
_NO_RESOLVERS: Final = (
    "${...} may only stand alone and name another value, such as ${model.dropout}; resolvers such as ${oc.env:...} are "
    "not run. In your own application, call OmegaConf.resolve(cfg) first"
)
_QUOTED: Final = re.compile(r"'.*'|\".*\"", flags=re.DOTALL)
_MOST_BYTES: Final = 100_000
_DEEPEST: Final = 8


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file as plain dicts, lists and scalars. It is read as by Hydra, but more strictly.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is too large, is not UTF-8 or not YAML, or uses tags, anchors or resolvers.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise type(error)(f"cannot read the config file {path}: {error.strerror}") from error
    return parse_yaml(content, str(path))


def parse_yaml(content: bytes, source: str) -> Any:
    """Return the content of YAML, as `read_yaml` does. Errors name the `source`.

    Raises:
        ValueError: as `read_yaml`.
    """
    # The path may name a secret file. So the texts here quote only a duplicate key, and no error is chained to its
    # cause. Later checks quote keys and the values of known keys, 80 characters at most.
    try:
        if len(content) > _MOST_BYTES:
            raise ValueError(f"a config file may have at most {_MOST_BYTES:,} bytes")
        return _parsed(content.decode("utf-8"))
    except UnicodeDecodeError:
        raise ValueError(f"{source}: a config file must be UTF-8 text") from None
    except RecursionError:
        raise ValueError(f"{source} is nested deeper than the {_DEEPEST} levels allowed") from None
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
    # The events are checked before anything is built, since anchors can expand a few lines into gigabytes.
    events = list(yaml.parse(text, Loader=yaml.SafeLoader))
    first = next((event for event in events if isinstance(event, yaml.NodeEvent)), None)
    if isinstance(first, yaml.ScalarEvent):  # OmegaConf would read it as a key
        raise ValueError("a config must be a mapping of groups, got a single value")
    for event in events:
        assert event.start_mark is not None
        line = f"line {event.start_mark.line + 1}"
        if getattr(event, "tag", None) is not None:
            raise ValueError(f"YAML tags are refused, got one in {line}: a config holds plain values")
        if getattr(event, "anchor", None) is not None:
            raise ValueError(f"YAML anchors are refused, got one in {line}: write the value out")
        if isinstance(event, yaml.ScalarEvent) and _is_refused(event.value):  # before OmegaConf parses it
            raise ValueError(f"{line}: {_NO_RESOLVERS}")
    return OmegaConf.to_container(OmegaConf.load(io.StringIO(text)), resolve=False)


def plain_copy(value: Any, where: str = "", *, depth: int = 0) -> Any:
    """Return a copy that consists only of dict, list, str, int, float, bool and None.

    Args:
        value: mappings (omegaconf's too), sequences, choices and scalars.
        where: the path of the value, for error texts: "model.position".
        depth: the nesting depth of the value.

    Raises:
        ValueError: the value could run code (`_target_`, a resolver), has another type or is nested too deeply.

    >>> plain_copy({"_target_": "os.system"})
    Traceback (most recent call last):
    ValueError: '_target_' is refused: a config names registered components, it cannot call code
    """
    if depth > _DEEPEST:
        raise ValueError(f"{where} is nested deeper than the {_DEEPEST} levels allowed")
    if isinstance(value, Container):
        value = OmegaConf.to_container(value, resolve=False)
    if isinstance(value, Choice):
        value = {"name": value.name, **value.options}
    if isinstance(value, Mapping):
        return {
            _key(key, where): plain_copy(entry, f"{where}.{key}" if where else str(key), depth=depth + 1)
            for key, entry in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [plain_copy(entry, f"{where}[{index}]", depth=depth + 1) for index, entry in enumerate(value)]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str) and _is_refused(value):
        raise ValueError(f"{where or 'a value'}={shown(str(value))} is refused: {_NO_RESOLVERS}")
    for scalar in (str, int, float):
        if isinstance(value, scalar):
            return scalar(value)
    advice = "; register its class with components.register, and write the name" if callable(value) else ""
    raise ValueError(
        f"{where or 'the config'} must be text, a number, true, false, null, a list or a mapping, "
        f"got a {type(value).__name__}{advice}"
    )


def in_a_word(content: Any) -> str:
    """Return the type of a value in words, for an error that must not show the value."""
    return "nothing" if content is None else f"a {type(content).__name__}"


def _is_refused(text: str) -> bool:
    return "${" in text and not REFERENCE.fullmatch(text)


def _key(key: Any, where: str) -> str:
    if not isinstance(key, str):
        raise ValueError(f"the keys of {where or 'a config'} must be text, got {shown(key)}")
    if key.startswith("_"):
        path = f"{where}.{key}" if where else key
        raise ValueError(f"{shown(path)} is refused: a config names registered components, it cannot call code")
    return str(key)
