"""Plain values: what a config may hold. Whatever a stranger's file or a caller's dict brings is copied through here."""

import re
from collections.abc import Mapping
from typing import Any, Final

from omegaconf import Container, OmegaConf

from ..components import Choice

__all__ = ["REFERENCE", "plain_copy"]

# One whole value, and only the name of another one: no text around it, no resolver, no nesting.
REFERENCE: Final = re.compile(r"\$\{([a-z]\w*(?:\.\w+)+)\}")

_DEEPEST: Final = 8
_LARGEST: Final = 10_000


def plain_copy(value: Any, where: str = "") -> Any:
    """Return a copy made of dict, list, str, int, float, bool and None alone.

    Args:
        value: mappings (omegaconf's too), sequences, choices and scalars.
        where: the path of the value, for error texts: "model.position".

    Raises:
        ValueError: the value could make somebody run code (`_target_`, a resolver), is of another type, is nested too
            deep or holds too much.

    >>> plain_copy({"suffixes": (".py",)})
    {'suffixes': ['.py']}
    >>> plain_copy({"_target_": "os.system"})
    Traceback (most recent call last):
    ValueError: '_target_' is refused: a config names registered components, it cannot call code
    """
    return _copy(value, where, depth=0, left=[_LARGEST])


def _copy(value: Any, where: str, *, depth: int, left: list[int]) -> Any:
    left[0] -= 1
    if depth > _DEEPEST:
        raise ValueError(f"{where} is nested deeper than {_DEEPEST} levels; no config is")
    if left[0] < 0:
        raise ValueError(f"the config is larger than {_LARGEST:,} values; no config is")
    if isinstance(value, Container):
        value = OmegaConf.to_container(value, resolve=False)
    if isinstance(value, Choice):
        value = {"name": value.name, **value.options}
    if isinstance(value, Mapping):
        return {
            _key(key, where): _copy(entry, _path(where, key), depth=depth + 1, left=left)
            for key, entry in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_copy(entry, f"{where}[{place}]", depth=depth + 1, left=left) for place, entry in enumerate(value)]
    if isinstance(value, str):
        return _text(str(value), where)
    if value is None or isinstance(value, bool):
        return value
    for number in (int, float):
        if isinstance(value, number):
            return number(value)
    raise ValueError(
        f"{where or 'the config'} must be text, a number, true, false, null, a list or a mapping, "
        f"got a {type(value).__name__}"
    )


def _key(key: Any, where: str) -> str:
    if not isinstance(key, str):
        raise ValueError(f"the keys of {where or 'a config'} must be text, got {key!r}")
    if key.startswith("_"):
        raise ValueError(f"{_path(where, key)!r} is refused: a config names registered components, it cannot call code")
    if key == "hydra" and not where:
        raise ValueError(
            "'hydra' is refused: Hydra only composes here, its own settings are not part of a config; "
            "folders of your own are named by an override, hydra.searchpath=[/my/configs]"
        )
    return str(key)


def _text(text: str, where: str) -> str:
    if "${" in text and not REFERENCE.fullmatch(text):
        raise ValueError(
            f"{where or 'a value'}={text!r} is refused: ${{...}} may only stand alone and name another value, "
            "as ${model.dropout}; resolvers such as ${oc.env:...} are not run"
        )
    return text


def _path(where: str, key: Any) -> str:
    return f"{where}.{key}" if where else str(key)
