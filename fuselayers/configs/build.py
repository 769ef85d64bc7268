"""compose and build -- from what a caller wrote to a model.

A caller writes a source (a model's name, a file, a mapping or a `Config`) and overrides in Hydra's grammar.
"""

import logging
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
from torch import nn

from ..components import Choice, create, get, names
from ..names import no_such, shown
from ..partition import fuse_in_place
from .group_files import SHIPPED, component_file, composed_files, names_in, open_folders
from .sections import (
    COMPONENT_GROUPS,
    COMPONENT_SECTIONS,
    GROUPS,
    SECTIONS,
    Config,
    FusionConfig,
    changed,
    check_group,
    finished,
    together,
    with_layer_changes,
)
from .values import in_a_word, plain_copy, read_yaml

Source = str | os.PathLike[str] | Mapping[str, Any] | Config

_SEARCH_PATH: Final = "hydra.searchpath"
_PATH: Final = re.compile(r"/|\.ya?ml$")
_PARSER: Final = OverridesParser.create()
_log = logging.getLogger("fuselayers")


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


def build(source: Source = "gpt_nano", overrides: Sequence[str] = ()) -> nn.Module:
    """Return the model that a config describes, fused as its section `fusion` says.

    At every scope the model keeps its class's name, its attributes and its state_dict keys. With the scope "block" the
    blocks, and with "model" the model, also become `FusedModule`. The attribute `built_from` holds the `Config`, which
    `rebuild` reads. Under `torch.device("meta")` the model takes no memory.

    Args:
        source: the name of a shipped model, the path of a .yaml file, a mapping or a `Config`, as for `compose`.
        overrides: changes to the config, as for `compose`.

    Raises:
        TypeError, OSError, ValueError: as `compose`; or a component rejects an option's value.

    >>> model = build("gpt_nano", ["feedforward=fused_mlp", "fusion=off", "model.num_layers=1"])
    >>> type(model).__name__, type(model.blocks[0].feedforward).__name__
    ('Decoder', 'FusedMLP')
    """
    config = source if isinstance(source, Config) and not overrides else compose(source, overrides)
    components = {group: getattr(config, group) for group in COMPONENT_GROUPS}
    model: nn.Module = create("model", with_layer_changes(config), **components)
    # Not through nn.Module's __setattr__, which is for parameters and modules.
    vars(model)["built_from"] = config
    fuse_as(model, config.fusion)
    return model


def fuse_as(model: nn.Module, fusion: FusionConfig) -> None:
    """Fuse in place the model with the scope "model", its blocks with the scope "block", nothing with "none"."""
    fused = {"block": blocks_of(model), "model": [model]}.get(fusion.scope, [])
    fuse_in_place(
        fused,
        backend=fusion.backend,
        partition=fusion.partition,
        compress=fusion.compress,
        cuda_graphs=bool(fusion.cuda_graphs),
    )


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that are registered blocks."""
    blocks = tuple(get("block", name) for name in names("block"))
    return [module for module in model.modules() if isinstance(module, blocks)]


def compose(source: Source = "gpt_nano", overrides: Sequence[str] = ()) -> Config:
    """Return the config that results from a source and overrides.

    Args:
        source: the name of a shipped model, the path of a .yaml file, a mapping, a `Config`, or the `DictConfig` of a
            Hydra application. It is layered over the shipped files, and is not changed; see `read_source`.
        overrides: in Hydra's grammar: "feedforward=fused_mlp" chooses, "feedforward.expansion=2" sets an option.
            Overrides win over the source, and the source wins over a model's file. Of two overrides with one path the
            last one wins. Choices are applied before options. "hydra.searchpath=[/my/configs]" adds your own folders,
            with the layout of the shipped groups.

    Choosing another component keeps each option that differs from the old component's default, if the new component has
    it. The logger "fuselayers" lists the options that take the new component's default or are dropped. Choosing another
    file of model, fusion, train, data or parallel replaces the source's section; a model's file also replaces the
    sections of its components.

    Raises:
        TypeError: the source or the overrides have another type.
        OSError: the file cannot be read, or there is no such folder.
        ValueError: a name, key, type or value is wrong; or the config names a class or a function, runs a resolver, or
            sets up Hydra, which no config may do.

    >>> config = compose("gpt_nano", ["feedforward=gated_mlp", "model.num_layers=2"])
    >>> config.feedforward.name, config.model.options["num_layers"]
    ('gated_mlp', 2)
    """
    asked, last = read_source(source), parse_overrides(overrides)
    folders = open_folders(last.search_path) if last.search_path else (SHIPPED,)
    # If the caller only names shipped files, the notes are not about options that the caller wrote.
    level = logging.WARNING if asked.settings or len(folders) > 1 else logging.INFO
    presets = {name: choice for name, choice in (asked.choices | last.choices).items() if name not in COMPONENT_GROUPS}
    notes = _replace(asked, last) if last.choices else []
    sections = composed_files(presets, folders)
    for group in COMPONENT_SECTIONS:
        section: dict[str, Any] = {}
        if not asked.complete:
            section = changed(group, {}, sections[group], where=group, notes=notes, merged=True)
        for request in (asked, last):
            if group in request.settings or (group in request.choices and group in COMPONENT_GROUPS):
                # A source over the shipped files replaces no options that its author wrote, so there are no notes.
                noted = notes if asked.complete or request is last else None
                change = _change(request, group, folders)
                section = changed(group, section, change, where=group, notes=noted, merged=request.complete)
        sections[group] = section
    for group in SECTIONS:
        for change in (*asked.settings.get(group, ()), *last.settings.get(group, ())):
            sections[group] = {**sections[group], **change}
    config = finished(sections)
    if notes:
        _log.log(level, "; ".join(notes))
    return config


def _change(request: Request, group: str, folders: tuple[Path, ...]) -> dict[str, Any]:
    """Return the choice and the options of a request for the section of a component, as one change."""
    changes = request.settings.get(group, [])
    if group in COMPONENT_GROUPS and group in request.choices:
        changes = [component_file(group, request.choices[group], folders), *changes]
    change = together(group, changes)
    name = change.get("name")
    if group == "model" and name in names_in(folders, group) and name not in names(group):
        raise ValueError(
            f"model.name is a registered model, such as decoder, and {name!r} is a file; choose it with model={name}"
        )
    return change


def _replace(asked: Request, last: Request) -> list[str]:
    """Remove the sections that presets replace: train=quick over a saved config means the shipped numbers.

    Return a note about the removed sections that the caller wrote.
    """
    presets = {group: choice for group, choice in last.choices.items() if group not in COMPONENT_GROUPS}
    # A model's file chooses its components. The source's components belonged to the replaced model.
    replaced = [*presets, *(COMPONENT_GROUPS if "model" in presets else ())]
    mentioned = asked.settings.keys() | (asked.choices.keys() - presets.keys())
    if asked.complete:
        mentioned = mentioned - SECTIONS.keys()  # made of files, not written by hand
    written = [group for group in replaced if group in mentioned]
    for group in replaced:
        asked.settings.pop(group, None)
        asked.choices.pop(group, None)
    asked.complete = asked.complete and "model" not in presets
    by = ", ".join(f"{group}={choice}" for group, choice in presets.items())
    return [f"{by} replaces {', '.join(written)} of the config"] if written else []


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


def split_source(arguments: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Return the config file at the start of a command line, or "" if there is none, and the overrides.

    A model's name at the start becomes the override that chooses it.

    >>> split_source(["tiny.yaml", "train.steps=5"])
    ('tiny.yaml', ['train.steps=5'])
    >>> split_source(["gpt_nano", "train.steps=5"])
    ('', ['model=gpt_nano', 'train.steps=5'])
    """
    first = arguments[0] if arguments else ""
    if "=" not in first and _PATH.search(first):
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
    if isinstance(source, str) and not _PATH.search(source):
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
