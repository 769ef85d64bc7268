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
        cuda_graphs=fusion.cuda_graphs,
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
    folders = open_folders(last.search_path)
    # If the caller only names shipped files, the notes are not about options that the caller wrote.
    level = logging.WARNING if asked.settings or len(folders) > 1 else logging.INFO
    notes = _replace(asked, last)
    presets = {name: choice for name, choice in (asked.choices | last.choices).items() if name not in COMPONENT_GROUPS}
    sections = composed_files(presets, folders)
    for group in COMPONENT_SECTIONS:
        files = sections[group]
        section = {} if asked.complete else changed(group, {}, files, where=group, notes=notes, merged=True)
        # A source over the shipped files replaces no options that its author wrote, so there are no notes.
        section = _applied(asked, group, section, folders, notes if asked.complete else [])
        sections[group] = _applied(last, group, section, folders, notes)
    for group in SECTIONS:
        for change in (*asked.settings.get(group, ()), *last.settings.get(group, ())):
            sections[group] = {**sections[group], **change}
    if notes:
        _log.log(level, "; ".join(notes))
    return checked_config(sections)


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
