"""Read a source (a model's name, a file, a mapping or a `Config`) and overrides in Hydra's grammar."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from ..components import Choice
from ..names import no_such, shown
from .group_files import COMPONENT_SECTIONS, GROUPS, check_group
from .schemas import Config
from .values import in_a_word, plain_copy, read_yaml

Source = str | os.PathLike[str] | Mapping[str, Any] | Config

_SEARCH_PATH: Final = "hydra.searchpath"
_PARSER: Final = OverridesParser.create()


@dataclass
class Request:
    """The choices and settings in a source, or in all overrides.

    Attributes:
        choices: group -> the name chosen in it.
        settings: group -> sections or parts of them, in order.
        search_path: the value of `hydra.searchpath`; only overrides may set it.
        complete: whether it names every component. If so, the shipped files add nothing to the components.
    """

    choices: dict[str, str] = field(default_factory=dict)
    settings: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    search_path: Any = ()
    complete: bool = False

    def add(self, group: str, value: Any) -> None:
        """Add a choice, or options, of a group.

        Raises:
            ValueError: there is no such group, or the value is neither a choice nor a mapping.
        """
        check_group(group)
        if value is False:
            value = "off"  # fusion: off, which YAML 1.1 reads as false
        if isinstance(value, str):
            self.choices[group] = value
        elif isinstance(value, dict):
            self.settings.setdefault(group, []).append(value)
        else:
            raise ValueError(f"{group} must be the name of a choice or a mapping of options, got {in_a_word(value)}")


def parse_overrides(overrides: Sequence[str]) -> Request:
    """Read overrides in order.

    Raises:
        TypeError: `overrides` is not a sequence of strings.
        ValueError: an override cannot be read, or does something that a config may not do.

    >>> request = parse_overrides(["feedforward=mlp", "feedforward.expansion=2"])
    >>> request.choices, request.settings
    ({'feedforward': 'mlp'}, {'feedforward': [{'expansion': 2}]})
    """
    if isinstance(overrides, (str, Mapping)):
        raise TypeError(
            "overrides must be a list of strings such as ['fusion=off', 'model.num_layers=2'], "
            f"got {shown(overrides)}; a name or a mapping may be the first argument"
        )
    request = Request()
    for text in overrides:
        override = _parsed(text)
        if override.key_or_group == _SEARCH_PATH:
            request.search_path = plain_copy(override.value(), _SEARCH_PATH)
            continue
        section: Any = override.value()
        for name in reversed(override.key_or_group.split(".")):
            section = {name: section}
        for group, value in plain_copy(section).items():
            request.add(group, value)
    return request


def _parsed(text: object) -> Override:
    if not isinstance(text, str):
        raise TypeError(f"an override must be a string such as 'train.steps=100', got {shown(text)}")
    try:
        override = _PARSER.parse_override(text)
        sweep = override.is_sweep_override()
    except (HydraException, RecursionError, ValueError) as error:  # ValueError: a number of 5,000 digits
        raise ValueError(
            f"cannot read the override {shown(text)}: write group=choice or group.option=value, without spaces, and "
            "put a value with special characters in two pairs of quotes: data.path='\"a=b\"'"
        ) from error
    if override.type is not OverrideType.CHANGE or override.package is not None or sweep:
        raise ValueError(
            f"the override {shown(text)} is refused: every option already has its place and takes one value, so write "
            "group=choice or group.option=value, without +, ~ and @; a list is written as [a,b]"
        )
    return override


def _is_path(text: str) -> bool:
    return text.endswith((".yaml", ".yml")) or "/" in text or os.sep in text


def split_source(arguments: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Return the config file at the start of a command line, or "" if there is none, and the overrides.

    A model's name at the start becomes the override that chooses it.

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
    """Return the request in a source. The caller's mapping is copied.

    A mapping has one entry per group: the name of a choice, or options (for a component with its registered `name`). To
    choose and to set options in the same group, put the choice into a `defaults` list, as in Hydra:
    `{"defaults": [{"model": "llama_tiny"}], "model": {"hidden_dim": 64}}`.

    A mapping with every component section, each with its name, is complete: the shipped files add nothing to these
    sections. A saved config is complete, and so is the `DictConfig` of a Hydra application with `fuselayers` in its
    defaults list. Of a complete `DictConfig` the component sections and `fusion` are read. `train`, `data` and
    `parallel` are read only if it has all three. Its other sections belong to the application and are ignored.

    Raises:
        TypeError: the source has another type.
        OSError: the file cannot be read.
        ValueError: the file or mapping holds something that a config may not hold.
    """
    if isinstance(source, str) and not _is_path(source):
        return Request(choices={"model": source})
    content: Any = source
    if isinstance(source, Config):
        content = plain_sections(source)
    elif isinstance(source, DictConfig):
        content = OmegaConf.to_container(source, resolve=False)
    elif isinstance(source, (str, os.PathLike)):
        path = Path(os.path.expanduser(source) if isinstance(source, str) else source)
        content = read_yaml(path) or None  # an empty file may be a truncated one
    elif not isinstance(source, Mapping):
        raise TypeError(
            "a config is the name of a shipped model, the path of a .yaml file or a mapping, "
            f"got a {type(source).__name__}"
        )
    if not isinstance(content, Mapping):
        raise ValueError(f"a config must be a mapping of groups, got {in_a_word(content)}")
    request = Request(complete=all(_names_component(kind, content.get(kind)) for kind in COMPONENT_SECTIONS))
    if isinstance(source, DictConfig) and request.complete:
        # The application may have sections of its own named train and data.
        ours = GROUPS if content.keys() >= set(GROUPS) else (*COMPONENT_SECTIONS, "fusion")
        content = {group: content[group] for group in ours if group in content}
    elif isinstance(source, DictConfig) and (others := content.keys() - {*GROUPS, "defaults"}):
        raise ValueError(
            f"{no_such('config group', min(others, key=str), GROUPS)}; the config of a Hydra application may have "
            "other groups too if it has every section of a model: write defaults: [fuselayers] in it"
        )
    content = plain_copy(content)
    for entry in _defaults(content.pop("defaults", [])):
        for group, choice in entry.items():
            # Hydra's own files say `override /feedforward`.
            request.add(re.sub(r"^(override +)?/?", "", group), choice)
    for group, section in content.items():
        request.add(group, section)
    return request


def _names_component(kind: str, section: Any) -> bool:
    if isinstance(section, str):
        return kind != "model"  # the name of a model's file
    return isinstance(section, Choice) or (isinstance(section, Mapping) and "name" in section)


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
    sections = vars(config).items()
    content = {name: section if isinstance(section, Choice) else vars(section) for name, section in sections}
    return dict(plain_copy(content))


def to_yaml(config: Config) -> str:
    """Return a config as YAML with every option. `compose` of a file with this text gives an equal config.

    >>> from fuselayers.configs import compose
    >>> "  eps: 1.0e-06\\n" in to_yaml(compose("gpt_nano", ["norm.eps=1e-6"]))
    True
    """
    return OmegaConf.to_yaml(plain_sections(config))
