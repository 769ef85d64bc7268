"""What a caller asks for: the name of a model, a file, a mapping, a `Config`; and overrides in Hydra's grammar."""

import functools
import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from ..components import Choice, names
from ..names import no_such, shown
from .group_files import COMPONENT_SECTIONS, GROUPS, check_group
from .schemas import SECTIONS, Config, section_options
from .sections import option_paths
from .values import in_a_word, plain_copy, read_yaml

Source = str | os.PathLike[str] | Mapping[str, Any] | Config

_LEFT_AT_DEFAULT: Final = "left_at_default"
_SEARCH_PATH: Final = "hydra.searchpath"
_LONGEST: Final = 10_000


@dataclass
class Request:
    """What a source, or the overrides together, ask for.

    Attributes:
        choices: group -> the name chosen in it.
        settings: group -> option -> value; a component within a component is a mapping again.
        search_path: of `hydra.searchpath`; only overrides may set it.
        left_at_default: of a saved config: the paths of options that nobody wrote.
        composed: "" where it goes on top of the shipped files; "saved" for a complete config, "hydra" for one that the
            caller's Hydra application composed.
        notes: for the log: what of the source is not taken.
    """

    choices: dict[str, str] = field(default_factory=dict)
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    search_path: Any = ()
    left_at_default: frozenset[str] = frozenset()
    composed: Literal["", "saved", "hydra"] = ""
    notes: list[str] = field(default_factory=list)

    def add(self, path: Sequence[str], value: Any) -> None:
        """Set a value (a mapping: each of its entries) at a path that begins with a group; the last one wins.

        Raises:
            ValueError: no such group, or a value that is no choice and no mapping.
        """
        group, *rest = path
        check_group(group)
        if value is False and not rest:
            value = "off"  # fusion: off, which YAML 1.1 reads as false
        if not rest and not isinstance(value, (str, dict)):
            raise ValueError(f"{group} must be the name of a choice or a mapping of options, got {in_a_word(value)}")
        if not rest and isinstance(value, str):
            self.choices[group] = value
        else:
            _put(self.settings.setdefault(group, {}), rest, value)


def _put(settings: dict[str, Any], path: Sequence[str], value: Any) -> None:
    if isinstance(value, dict):
        for key, entry in value.items():
            _put(settings, [*path, key], entry)
        return
    *parents, last = path
    for parent in parents:
        below = settings.setdefault(parent, {})
        if not isinstance(below, dict):
            # model.block=transformer, then an option of it: a component by its name becomes a mapping.
            below = settings[parent] = {"name": below}
        settings = below
    if isinstance(settings.get(last), dict):
        settings, last = settings[last], "name"
    settings[last] = value


def parse_overrides(overrides: Sequence[str]) -> Request:
    """Read overrides in their order; the last one of a path wins.

    Raises:
        TypeError: `overrides` is no sequence of strings.
        ValueError: an override cannot be read, or asks for what a config cannot do.

    >>> request = parse_overrides(["feedforward=mlp", "feedforward.expansion=2", "feedforward.expansion=3"])
    >>> request.choices, request.settings
    ({'feedforward': 'mlp'}, {'feedforward': {'expansion': 3}})
    """
    if isinstance(overrides, str):
        raise TypeError(
            f"overrides must be a list of strings, got the string {shown(overrides)}; write [{shown(overrides)}]"
        )
    if isinstance(overrides, Mapping):
        raise TypeError(
            "overrides must be a list of strings such as ['fusion=off', 'model.num_layers=2'], "
            f"got the mapping {shown(dict(overrides))}; a mapping may be the first argument"
        )
    request = Request()
    for text in overrides:
        override = _parsed(text)
        key = override.key_or_group
        if key == _SEARCH_PATH:
            request.search_path = plain_copy(override.value(), key)
            continue
        # The keys of the path are checked as those of a mapping are.
        path = key.split(".")
        value: Any = override.value()
        for name in reversed(path):
            value = {name: value}
        value = plain_copy(value)
        for name in path:
            value = value[name]
        request.add(path, value)
    return request


def _parsed(text: object) -> Override:
    if not isinstance(text, str):
        raise TypeError(f"an override must be a string such as 'train.steps=100', got {shown(text)}")
    if len(text) > _LONGEST:
        raise ValueError(f"an override may have {_LONGEST:,} characters at most, got {len(text):,}: {shown(text)}")
    try:
        override = _parsed_once(text)
        sweep = override.is_sweep_override()
    except (HydraException, RecursionError, ValueError) as error:  # ValueError: a number of 5,000 digits
        raise ValueError(
            f"cannot read the override {shown(text)}: write group=choice or group.option=value, without spaces, and a "
            "value with characters of its own meaning in two pairs of quotes: data.path='\"a=b\"'"
        ) from error
    if re.split("[./]", override.key_or_group)[0] == "hydra" and override.key_or_group != _SEARCH_PATH:
        raise ValueError(
            f"the override {shown(text)} is refused: Hydra only composes here, its own settings are not part of a "
            f"config; only {_SEARCH_PATH}=[/my/configs] is taken"
        )
    if override.type is not OverrideType.CHANGE or override.package is not None:
        raise ValueError(
            f"the override {shown(text)} is refused: every option has its place already, so write group=choice or "
            "group.option=value, without +, ~ and @"
        )
    if sweep:
        raise ValueError(f"the override {shown(text)} asks for several runs; give one value, or a list as [a,b]")
    return override


# Hydra's grammar takes a millisecond per override, and `fuselayers train` reads each one several times.
_parsed_once: Final = functools.lru_cache(OverridesParser.create().parse_override)


def _is_path(text: str) -> bool:
    return text.endswith((".yaml", ".yml")) or "/" in text or os.sep in text


def split_source(arguments: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Return the config file that a command line begins with, "" if there is none, and the overrides.

    A model's name in front is the override that chooses it.

    >>> split_source(["tiny.yaml", "train.steps=5"])
    ('tiny.yaml', ['train.steps=5'])
    >>> split_source(["gpt_nano", "train.steps=5"])
    ('', ['model=gpt_nano', 'train.steps=5'])
    """
    first = arguments[0] if arguments else ""
    if "=" not in first and _is_path(first):
        return first, arguments[1:]
    if first.replace("-", "_").isidentifier():
        return "", [f"model={first}", *arguments[1:]]
    return "", arguments


def read_source(source: Source) -> Request:
    """Return what a source asks for. The caller's mapping is copied.

    A mapping has one entry per group: the name of a choice, or options (for a component with its registered `name`). To
    choose and to set options in the same group, put the choice into a `defaults` list, as in Hydra:
    `{"defaults": [{"model": "llama_tiny"}], "model": {"hidden_dim": 64}}`.

    A `DictConfig` that holds every component section was composed by the caller's own Hydra application. Its component
    sections and `fusion` are taken as they are. `train`, `data` and `parallel` are taken if all their keys are options
    of ours; if not, a line in the log says so. The other entries are the application's.

    Raises:
        TypeError: it is none of the four.
        OSError: the file cannot be read.
        ValueError: the file or mapping holds what a config cannot.
    """
    if isinstance(source, Config):
        request = _from_mapping(plain_sections(source))
        request.left_at_default, request.composed = source.left_at_default, "saved"
        return request
    if isinstance(source, DictConfig):
        return _from_application(source) or _from_mapping(source)
    if isinstance(source, Mapping):
        return _from_mapping(source)
    if isinstance(source, str) and not _is_path(source):
        return Request(choices={"model": source})
    if isinstance(source, (str, os.PathLike)):
        path = Path(os.path.expanduser(source) if isinstance(source, str) else source)
        return _from_mapping(read_yaml(path) or None)  # an empty file may have been cut off
    raise TypeError(
        f"a config is the name of a shipped model, the path of a .yaml file or a mapping, got a {type(source).__name__}"
    )


def _from_application(config: DictConfig) -> Request | None:
    content = OmegaConf.to_container(config, resolve=False)
    if not isinstance(content, dict) or _LEFT_AT_DEFAULT in content:
        return None
    if not all(isinstance(content.get(kind), dict) and "name" in content[kind] for kind in COMPONENT_SECTIONS):
        for group in content.keys() - {*GROUPS, "defaults"}:
            raise ValueError(
                f"{no_such('config group', group, GROUPS)}; the config of a Hydra application may hold more, and then "
                f"needs every section of a model: write defaults: [fuselayers] in it"
            )
        return None
    # These are names that many applications use themselves.
    foreign = {
        group: reason for group in ("train", "data", "parallel") if (reason := _foreign(group, content.get(group, {})))
    }
    notes = []
    if foreign:
        are = "are" if len(foreign) > 1 else "is"
        notes = [f"{' and '.join(foreign)} of the application {are} not taken: {', '.join(foreign.values())}"]
    sections = {group: content[group] for group in GROUPS if group in content and group not in foreign}
    return Request(settings=plain_copy(sections), composed="hydra", notes=notes)


def _foreign(group: str, section: Any) -> str:
    """Return why a section of an application is not ours, or ""."""
    if not isinstance(section, dict):
        return f"{group} is no mapping of options"
    known = [option.name for option in section_options(SECTIONS[group])]
    return next((f"{group}.{key} is no option of ours" for key in section if key not in known), "")


def _from_mapping(content: Any) -> Request:
    if not isinstance(content, Mapping):
        raise ValueError(f"a config must be a mapping of groups, got {in_a_word(content)}")
    content = plain_copy(content)
    request = Request()
    if _LEFT_AT_DEFAULT in content:
        request.left_at_default = frozenset(_paths(content.pop(_LEFT_AT_DEFAULT)))
        request.composed = "saved"
    for entry in _defaults(content.pop("defaults", [])):
        for group, choice in entry.items():
            # Hydra's own files say `override /feedforward`.
            request.add([re.sub(r"^(override +)?/?", "", group)], choice)
    for group, section in content.items():
        request.add([group], section)
    _check_left_at_default(request)
    return request


def _check_left_at_default(request: Request) -> None:
    known: dict[str, list[str]] = {}
    for path in sorted(request.left_at_default):
        kind, _, option = path.partition(".")
        if kind not in COMPONENT_SECTIONS:
            raise ValueError(f"{_LEFT_AT_DEFAULT} has {shown(path)}: {no_such('component', kind, COMPONENT_SECTIONS)}")
        section = {"name": request.choices.get(kind), **request.settings.get(kind, {})}
        if section["name"] is not None and section["name"] not in names(kind):
            continue  # the component's name has an error of its own
        if kind not in known:
            known[kind] = [one.removeprefix(f"{kind}.") for one in option_paths(kind, section, where=kind)]
        if option not in known[kind]:
            raise ValueError(f"{_LEFT_AT_DEFAULT} has {shown(path)}: {no_such(f'{kind} option', option, known[kind])}")


def _paths(paths: Any) -> list[str]:
    if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
        raise ValueError(
            f"{_LEFT_AT_DEFAULT} must be a list of options such as feedforward.bias, got {in_a_word(paths)}"
        )
    return paths


def _defaults(entries: Any) -> list[dict[str, Any]]:
    if not isinstance(entries, list):
        raise ValueError(f"defaults must be a list of group: choice, got {in_a_word(entries)}")
    chosen = [entry for entry in entries if entry != "_self_"]
    for entry in chosen:
        if not isinstance(entry, dict) or not all(isinstance(choice, (str, bool)) for choice in entry.values()):
            raise ValueError(f"an entry of defaults must be group: choice, got {shown(entry)}")
    return chosen


def plain_sections(config: Config) -> dict[str, Any]:
    """Return a config as plain dicts, section by section."""
    return {
        name: plain_copy(section if isinstance(section, Choice) else vars(section), name)
        for name, section in vars(config).items()
        if name != _LEFT_AT_DEFAULT
    }


def to_yaml(config: Config) -> str:
    """Return a config as YAML, every option of it; `compose` of a file with this text gives an equal config.

    The list `left_at_default` names the options that nobody wrote.

    >>> from fuselayers.configs import compose
    >>> print(to_yaml(compose("gpt_nano", ["norm.eps=1e-6"])).partition("residual:")[0], end="")
    model:
    ...
    norm:
      name: layer_norm
      eps: 1.0e-06
      bias: true
    """
    text: str = OmegaConf.to_yaml(plain_sections(config))
    paths = textwrap.fill(
        f"{_LEFT_AT_DEFAULT}: [{', '.join(sorted(config.left_at_default))}]", 80, subsequent_indent="  "
    )
    return f"{text}# The options that nobody wrote: a swap of the component gives them its default.\n{paths}\n"
