"""compose and build -- from a config to a model."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ..components import create, get, names
from ..partition import fuse_in_place
from .group_files import COMPONENT_GROUPS, COMPONENT_SECTIONS, component_file, composed_files, names_in, open_folders
from .schemas import SECTIONS, Config, FusionConfig
from .sections import changed, checked_config, together, with_layer_changes
from .sources import Request, Source, parse_overrides, read_source

_log = logging.getLogger("fuselayers")


def build(source: Source = "gpt_nano", overrides: Sequence[str] = ()) -> nn.Module:
    """Return the model that a config describes, fused as its section `fusion` says.

    It is the model itself at every scope: its class, attributes and keys of the state_dict are the plain model's. At
    the scopes "block" and "model" the blocks or the model are `FusedModule` too. The attribute `built_from` holds the
    `Config`, which `rebuild` reads. Under `torch.device("meta")` the model takes no memory.

    Args:
        source: the name of a shipped model, the path of a .yaml file, a mapping or a `Config`, as for `compose`.
        overrides: of the config, as for `compose`.

    Raises:
        TypeError, OSError, ValueError: as `compose`; or a component refuses an option's value.

    >>> model = build("gpt_nano", ["feedforward=fused_mlp", "fusion=off", "model.num_layers=1"])
    >>> type(model).__name__, type(model.blocks[0].feedforward).__name__
    ('Decoder', 'FusedMLP')
    """
    config = source if isinstance(source, Config) and not overrides else compose(source, overrides)
    components = {group: getattr(config, group) for group in COMPONENT_GROUPS}
    model: nn.Module = create("model", with_layer_changes(config), **components)
    # Not through nn.Module's own way to set an attribute, which is for parameters and modules.
    vars(model)["built_from"] = config
    fuse_as(model, config.fusion)
    return model


def fuse_as(model: nn.Module, fusion: FusionConfig) -> None:
    """Fuse a model, or its blocks, in place, as a scope of "model" or "block" says."""
    fused = {"block": blocks_of(model), "model": [model]}.get(fusion.scope, [])
    fuse_in_place(fused, backend=fusion.backend, partition=fusion.partition, compress=fusion.compress)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that are registered blocks."""
    blocks = tuple(get("block", name) for name in names("block"))
    return [module for module in model.modules() if isinstance(module, blocks)]


def compose(source: Source = "gpt_nano", overrides: Sequence[str] = ()) -> Config:
    """Return the config that a source and overrides make.

    Args:
        source: the name of a shipped model, the path of a .yaml file, a mapping, a `Config`, or the `DictConfig` of a
            Hydra application. It is layered over the shipped files, and is not changed; see `read_source`.
        overrides: in Hydra's grammar: "feedforward=fused_mlp" chooses, "feedforward.expansion=2" sets an option. They
            win over the source, which wins over a model's file, and the last one of a path wins. Choices come before
            options. "hydra.searchpath=[/my/configs]" names folders of your own, laid out as the shipped groups are.

    Choosing another component keeps every value that differs from the old component's default and that the new one has
    an option for. A line in the log "fuselayers" tells the options that take the new component's default, or are
    dropped. Choosing another file of model, fusion, train or data replaces the source's section, and a model's file
    those of its components too.

    Raises:
        TypeError: the source or the overrides are of another type.
        OSError: the file cannot be read, or there is no such folder.
        ValueError: a name, key, type or value is wrong; or the config asks for what no config may do, such as to name a
            class or a function, to run a resolver, or to set up Hydra.

    >>> config = compose("gpt_nano", ["feedforward=gated_mlp", "model.num_layers=2"])
    >>> config.feedforward.name, config.model.options["num_layers"]
    ('gated_mlp', 2)
    """
    asked, last = read_source(source), parse_overrides(overrides)
    folders = open_folders(last.search_path)
    # A caller who only names shipped files wrote none of the options that a note is about.
    level = logging.WARNING if asked.settings or len(folders) > 1 else logging.INFO
    notes = _replace(asked, last)
    presets = {name: choice for name, choice in (asked.choices | last.choices).items() if name not in COMPONENT_GROUPS}
    sections = composed_files(presets, folders)
    for group in COMPONENT_SECTIONS:
        files = {} if asked.complete else sections[group]
        section = changed(group, {}, files, where=group, notes=notes, merged=True) if files else {}
        # A source on top of the shipped files replaces nothing that its author wrote, so it makes no notes.
        section = _applied(asked, group, section, folders, notes if asked.complete else [])
        sections[group] = _applied(last, group, section, folders, notes)
    for group in SECTIONS:
        for change in (*asked.settings.get(group, ()), *last.settings.get(group, ())):
            sections[group] = {**sections[group], **change}
    if notes:
        _log.log(level, "; ".join(notes))
    return checked_config(sections)


def _replace(asked: Request, last: Request) -> list[str]:
    """Remove the sections that presets replace: train=quick over a saved config means the shipped numbers."""
    presets = {group: choice for group, choice in last.choices.items() if group not in COMPONENT_GROUPS}
    # A model's file chooses its components; those of the source belonged to the model that is replaced.
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


def _applied(
    request: Request, group: str, section: dict[str, Any], folders: Sequence[Path], notes: list[str]
) -> dict[str, Any]:
    """Return a component's section with the choice and the options of a request."""
    changes = request.settings.get(group, [])
    if group in COMPONENT_GROUPS and group in request.choices:
        changes = [component_file(group, request.choices[group], folders), *changes]
    if not changes:
        return section
    change = together(group, changes)
    name = change.get("name")
    if group == "model" and isinstance(name, str) and name not in names("model") and name in names_in(folders, "model"):
        raise ValueError(
            f"model.name is a registered model, such as decoder, and {name!r} is a file; choose it with model={name}"
        )
    return changed(group, section, change, where=group, notes=notes, merged=request.complete)
