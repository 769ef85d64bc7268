"""compose -- the shipped files, then the caller's file or mapping, then the overrides: one checked `Config`."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..components import Choice, names
from ..names import no_such
from .files import chosen_component, composed
from .folders import COMPONENT_GROUPS, COMPONENT_SECTIONS, GROUPS, names_in, open_folders
from .layers import LAYER_OPTIONS, checked_entries, with_layer_changes
from .overrides import Layer, parse_overrides
from .references import resolved
from .renamed import check_renamed
from .schemas import Config, DataConfig, FusionConfig, TrainConfig
from .sections import changed, checked_choice, completed
from .source import Source, read_source

__all__ = ["compose"]

_MISSING = "???"


def compose(source: Source = "gpt_nano", overrides: Sequence[str] = ()) -> Config:
    """Return the config that a source and overrides make.

    Args:
        source: the name of a shipped model, the path of a .yaml file, a mapping or a `Config`. It is layered over the
            shipped files, and is not changed; see `read_source` for how a mapping says what.
        overrides: in Hydra's grammar: "feedforward=fused_mlp" chooses, "feedforward.expansion=2" sets an option. They
            win over the source, which wins over a model's file. Their order does not matter.
            "hydra.searchpath=[/my/configs]" names folders of your own, laid out as the shipped groups are: the choice
            of a name looks into the shipped files first, then there, in their order.

    Choosing another component keeps what was set for the old one away from its defaults, where the new one has an
    option of that name. Choosing another file of model, fusion, train or data replaces the source's section,
    and that of a model its parts too.

    Raises:
        TypeError: the source or the overrides are of another type.
        OSError: the file cannot be read, or there is no such folder.
        ValueError: a name, key, type or value is wrong; or the config asks for what no config may do, as to name a
            class or a function, to run a resolver, or to set up Hydra.

    >>> config = compose("gpt_nano", ["feedforward=gated_mlp", "model.num_layers=2"])
    >>> config.feedforward.name, config.model.options["num_layers"]
    ('gated_mlp', 2)
    """
    asked = read_source(source)
    last = parse_overrides(overrides)
    presets = {**_presets(asked), **_presets(last)}
    folders = open_folders(last.search_path)
    sections = composed(presets, folders)
    check_renamed([asked, last], model=_model_name(sections, asked, last))
    # `train=quick` over a saved config means the shipped numbers, not the saved ones.
    for group in _presets(last):
        asked.settings.pop(group, None)
    # A model's file chooses its parts; those of the source belonged to the model that is replaced.
    if "model" in _presets(last):
        for group in COMPONENT_GROUPS:
            asked.settings.pop(group, None)
            asked.choices.pop(group, None)
    for layer in (asked, last):
        _apply(sections, layer, folders)
    return _checked(sections)


def _presets(layer: Layer) -> dict[str, str]:
    return {group: choice for group, choice in layer.choices.items() if group not in COMPONENT_GROUPS}


def _model_name(sections: dict[str, dict[str, Any]], *layers: Layer) -> str:
    name = sections["model"]["name"]
    for layer in layers:
        name = layer.settings.get("model", {}).get("name", name)
    return str(name)


def _apply(sections: dict[str, dict[str, Any]], layer: Layer, folders: Sequence[Path]) -> None:
    for group, choice in layer.choices.items():
        if group in COMPONENT_GROUPS:
            sections[group] = changed(group, sections[group], chosen_component(group, choice, folders), where=group)
    for group, settings in layer.settings.items():
        name = settings.get("name")
        if group == "model" and name not in names("model") and name in names_in(folders, "model"):
            raise ValueError(
                f"model.name is a registered model, such as decoder, and {name!r} is a file; "
                f"choose it with model={name}"
            )
        if group in COMPONENT_SECTIONS:
            sections[group] = changed(group, sections[group], settings, where=group)
        else:
            sections[group] = {**sections[group], **settings}


def _checked(sections: dict[str, dict[str, Any]]) -> Config:
    complete = {
        group: completed(group, sections[group], where=group) if group in COMPONENT_SECTIONS else sections[group]
        for group in GROUPS
    }
    plain = resolved(complete)
    components = {kind: checked_choice(kind, plain[kind], where=kind) for kind in COMPONENT_SECTIONS}
    model = components["model"]
    layers = {
        option: checked_entries(model.options[option], option=option)
        for option in LAYER_OPTIONS
        if option in model.options
    }
    components["model"] = Choice(model.name, {**model.options, **layers})
    with_layer_changes(components["model"], plain)  # what is wrong in them is found here, not when the model is built
    return Config(
        **components,
        fusion=_section("fusion", FusionConfig, plain["fusion"]),
        train=_section("train", TrainConfig, plain["train"]),
        data=_section("data", DataConfig, plain["data"]),
    )


def _section(name: str, schema: type, values: dict[str, Any]) -> Any:
    known = [field.name for field in fields(schema)]
    for option, value in values.items():
        if option not in known:
            raise ValueError(no_such(f"{name} option", option, known))
        if value == _MISSING:
            raise ValueError(f"{name}.{option} has no value yet; set {name}.{option}=")
    return schema(**values)
