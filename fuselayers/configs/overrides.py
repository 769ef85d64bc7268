"""Overrides in Hydra's grammar, sorted into choices ("feedforward=mlp") and settings ("feedforward.expansion=2")."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException

from ..names import no_such
from .folders import GROUPS
from .hydra_private import value_of
from .values import plain_copy

__all__ = ["Layer", "check_group", "parse_overrides"]

_SEARCH_PATH: Final = "hydra.searchpath"
_LONGEST: Final = 10_000
_SHOWN: Final = 60


@dataclass
class Layer:
    """What one source of a config asks for.

    A layer is a set of wishes: where two of them disagree nothing says which one counts, and it is an error.

    Attributes:
        choices: group -> the name chosen in it.
        settings: group -> option -> value; a component within a component is a mapping again.
        search_path: what `hydra.searchpath` says; only overrides may say it.
    """

    choices: dict[str, str] = field(default_factory=dict)
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    search_path: Any = ()

    def add(self, path: Sequence[str], value: Any) -> None:
        """Add a value (a mapping: each of its entries) at a path that begins with a group.

        Raises:
            ValueError: no such group, or another value was given for the same path.
        """
        group, *rest = path
        check_group(group)
        if not rest and not isinstance(value, (str, dict)):
            raise ValueError(f"{group} must be the name of a choice or a mapping of options, got {value!r}")
        if not rest and isinstance(value, str):
            self.choices[group] = _agreed(group, self.choices.get(group, value), value)
        else:
            _put(self.settings.setdefault(group, {}), rest, value, ".".join(path))


def check_group(group: str) -> None:
    """Raise ValueError, with the nearest one, unless there is such a config group."""
    if group not in GROUPS:
        raise ValueError(no_such("config group", group, GROUPS))


def parse_overrides(overrides: Sequence[str]) -> Layer:
    """Read overrides; their order does not matter.

    Raises:
        TypeError: `overrides` is no sequence of strings.
        ValueError: an override cannot be read, asks for what a config cannot do, or contradicts another one.

    >>> layer = parse_overrides(["feedforward=mlp", "feedforward.expansion=2"])
    >>> layer.choices, layer.settings
    ({'feedforward': 'mlp'}, {'feedforward': {'expansion': 2}})
    """
    if isinstance(overrides, str):
        raise TypeError(f"overrides must be a list of strings, got the string {overrides!r}; write [{overrides!r}]")
    layer = Layer()
    for text in overrides:
        override = _parsed(text)
        key = override.key_or_group
        if key == _SEARCH_PATH:
            asked = plain_copy(value_of(override), key)
            layer.search_path = _agreed(key, layer.search_path or asked, asked)
            continue
        # A value that is a mapping may bring keys of its own: they pass the same door.
        path = key.split(".")
        value: Any = value_of(override)
        for name in reversed(path):
            value = {name: value}
        value = plain_copy(value)
        for name in path:
            value = value[name]
        layer.add(path, value)
    return layer


def _parsed(text: object) -> Override:
    if not isinstance(text, str):
        raise TypeError(f"an override must be a string such as 'train.steps=100', got {text!r}")
    shown = repr(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!r}..."
    if len(text) > _LONGEST:
        raise ValueError(f"an override may have {_LONGEST:,} characters at most, got {len(text):,}: {shown}")
    try:
        override = OverridesParser.create().parse_override(text)
        sweep = override.is_sweep_override()
    except (HydraException, RecursionError, ValueError) as error:  # ValueError: a number of 5,000 digits
        raise ValueError(
            f"cannot read the override {shown}: write group=choice or group.option=value, without spaces, and a value "
            "with characters of its own meaning in two pairs of quotes: data.path='\"a=b\"'"
        ) from error
    if re.split("[./]", override.key_or_group)[0] == "hydra" and override.key_or_group != _SEARCH_PATH:
        raise ValueError(
            f"the override {shown} is refused: Hydra only composes here, its own settings are not part of a config; "
            f"only {_SEARCH_PATH}=[/my/configs] is taken"
        )
    if override.type is not OverrideType.CHANGE or override.package is not None:
        raise ValueError(
            f"the override {shown} is refused: every option has its place already, so write group=choice or "
            "group.option=value, without +, ~ and @"
        )
    if sweep:
        raise ValueError(f"the override {shown} asks for several runs; give one value, or a list as [a,b]")
    return override


def _put(settings: dict[str, Any], path: Sequence[str], value: Any, where: str) -> None:
    if isinstance(value, dict):
        for key, entry in value.items():
            _put(settings, [*path, key], entry, f"{where}.{key}")
        return
    *parents, last = path
    for parent in parents:
        below = settings.setdefault(parent, {})
        if not isinstance(below, dict):
            # model.position=rotary beside model.position.base=500: a component by its name, and one of its options.
            below = settings[parent] = {"name": below}
        settings = below
    if isinstance(settings.get(last), dict):
        settings, last = settings[last], "name"
    settings[last] = _agreed(where, settings.get(last, value), value)


def _agreed(where: str, before: Any, value: Any) -> Any:
    if (type(before), before) != (type(value), value):
        raise ValueError(f"{where} is given twice, as {before!r} and {value!r}; give it once")
    return value
