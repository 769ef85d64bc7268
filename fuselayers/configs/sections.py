"""Sections of a config that name a component: change them, complete them, and check them against the signature.

Such a section is a plain dict {"name": a registered name, option: value, ...}. An option may hold a component too, such
as a model's block or the expert of a mixture. Its value is such a dict, or only the name.
"""

from collections.abc import Sequence
from typing import Any, Final

from omegaconf import Container, DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, InterpolationResolutionError

from ..components import REQUIRED, Choice, LayerChange, Option, names, options
from ..components.model.layers import PARTS
from ..components.registry import no_option
from ..names import no_such, shown
from .group_files import COMPONENT_SECTIONS, paths_with
from .schemas import SECTIONS, Config, alternatives, checked_option, section_options
from .values import REFERENCE, plain_copy

# The options of models whose values are lists of {at: layers, component: its name or options}.
_LAYER_OPTIONS: Final = ("layers", "decoder_layers")
_MISSING: Final = "???"
_ABSENT: Final = object()


def changed(
    kind: str,
    section: dict[str, Any],
    changes: dict[str, Any],
    *,
    where: str,
    notes: list[str] | None = None,
    merged: bool = False,
) -> dict[str, Any]:
    """Return a section with changes applied. A change of `name` swaps the component first.

    Files, a saved config and overrides are all applied in this way, one after the other. A swap keeps every value that
    differs from the old component's default, if the new component has the option. Other options take the new
    component's default.

    Args:
        kind: the kind of the component.
        section: the section before the changes; it may be empty.
        changes: a section, or options without a name.
        where: the path of the section, for error texts and notes.
        notes: a list that gets one line per swap: the options that it drops, and the defaults that change.
        merged: whether Hydra merged the changes from several files. If so, options of another component are dropped:
            llama_tiny.yaml sets multiple_of for its gated_mlp, also with feedforward=mlp.

    Raises:
        ValueError: no such component or option.

    >>> notes = []
    >>> changed("feedforward", {"name": "mlp", "bias": True}, {"name": "gated_mlp"}, where="feedforward", notes=notes)
    {'name': 'gated_mlp'}
    >>> notes
    ["feedforward=gated_mlp replaces mlp: by default ... activation='silu' (was 'gelu'), bias=False (was True)"]
    """
    notes = [] if notes is None else notes
    name = changes.get("name", section.get("name"))
    if not isinstance(name, str):
        raise ValueError(f"{where} must name a {kind}, got {shown(name)}; there are: {', '.join(names(kind))}")
    known = _options(kind, name)
    result = {**section, "name": name}
    if section.get("name", name) != name:
        old = _options(kind, section["name"])
        kept = [key for key, value in section.items() if key in known and not _is_default(old[key], value)]
        result = {"name": name, **{key: section[key] for key in kept}}
        notes += _swap_notes(kind, section, {**result, **changes}, where)
    for key, value in changes.items():
        if key == "name":
            continue
        if key not in known:
            if merged and any(key in _options(kind, other) for other in names(kind)):
                notes.append(f"{where}: {name} has no option {key}, so {key}={_in_a_note(value)} is dropped")
                continue
            raise ValueError(no_option(kind, name, key, elsewhere=paths_with(key, without=kind)))
        inner = _kind_within(known[key], value)
        if inner is not None:
            path = f"{where}.{key}"
            before = _as_section(result.get(key, known[key].default) or {}, path)
            # A default that is not in the section is replaced without a note.
            noted = notes if key in result else None
            value = changed(inner, before, _as_section(value, path), where=path, notes=noted, merged=merged)
        result[key] = value
    return result


def together(kind: str, changes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the changes of a section merged into one. Of two changes of one path the last one wins.

    An inner component is chosen before its options are set, in whichever order they come.
    """
    sections = [
        {key: {"name": value} if isinstance(value, str) and _holds_component(kind, key) else value}
        for change in changes
        for key, value in change.items()
    ]
    merged: dict[str, Any] = OmegaConf.to_container(OmegaConf.merge({}, *sections), resolve=False)  # type: ignore
    return merged


def _holds_component(kind: str, key: str) -> bool:
    return any(
        key == option.name and _kind_within(option, "") for name in names(kind) for option in options(kind, name)
    )


def _swap_notes(kind: str, before: dict[str, Any], after: dict[str, Any], where: str) -> list[str]:
    """Return one line about a swap, or none: options that take another default, and options that are dropped."""
    old, new = _options(kind, before["name"]), _options(kind, after["name"])
    parts = [
        f"{name}={_in_a_note(option.default)} (was {_in_a_note(old[name].default)})"
        for name, option in new.items()
        if name in old and name not in after and option.default not in (old[name].default, REQUIRED)
    ]
    notes = [f"by default {', '.join(parts)}"] if parts else []
    dropped = [
        f"{key}={_in_a_note(value)}"
        for key, value in before.items()
        if key != "name" and key not in new and not _is_default(old[key], value)
    ]
    if dropped:
        notes.append(f"dropped {', '.join(dropped)}, which {after['name']} does not have")
    return [f"{where}={after['name']} replaces {before['name']}: {'; '.join(notes)}"] if notes else []


def _in_a_note(value: Any) -> str:
    """Return a value as text for the log: a component by its name, a number with four digits."""
    if isinstance(value, Choice):
        return value.name
    if isinstance(value, dict) and "name" in value:
        return str(value["name"])
    return f"{value:.4g}" if isinstance(value, float) else shown(value)


def _is_default(option: Option, value: Any) -> bool:
    if option.default is REQUIRED:
        return False
    inner = _kind_within(option, value)
    if inner is None or option.default is None:
        return bool(value == plain_copy(option.default))
    value, default = _as_section(value, option.name), _as_section(option.default, option.name)
    return completed(inner, {**default, **value}, where="") == completed(inner, default, where="")


def checked_config(sections: dict[str, dict[str, Any]]) -> Config:
    """Return the config of all sections, each completed, with references resolved, and checked.

    Raises:
        ValueError: an option is missing, is unknown, has another type or is out of range; or a reference names an
            unknown option, a section, a list, or itself.
    """
    complete = {kind: completed(kind, sections[kind], where=kind) for kind in COMPONENT_SECTIONS}
    every: dict[str, Any] = {**sections, **complete}
    tree = OmegaConf.create(every)
    plain = {name: _resolved(section, name, tree) for name, section in every.items()}
    components: dict[str, Any] = {kind: checked_choice(kind, plain[kind], where=kind) for kind in COMPONENT_SECTIONS}
    config = Config(**components, **{name: _section(name, plain[name]) for name in SECTIONS})
    with_layer_changes(config)  # raises for a wrong layer before anything is built
    return config


def _resolved(value: Any, where: str, tree: DictConfig) -> Any:
    """Return a value with each `${section.option}` replaced by the value of that option."""
    if isinstance(value, dict):
        return {key: _resolved(entry, f"{where}.{key}", tree) for key, entry in value.items()}
    if isinstance(value, list):
        return [_resolved(entry, f"{where}[{index}]", tree) for index, entry in enumerate(value)]
    if not isinstance(value, str) or not (reference := REFERENCE.fullmatch(value)):
        return value
    try:
        named = OmegaConf.select(tree, reference[1], default=_ABSENT)
    except InterpolationKeyError:
        named = _ABSENT
    except InterpolationResolutionError as error:
        raise ValueError(f"{where} refers to itself, through {value}; give it a value") from error
    if named is _ABSENT:
        raise ValueError(f"{where} refers to {value}, which this config does not have")
    # OmegaConf would copy lists, and lists of references to lists of references grow without bound.
    if isinstance(named, Container):
        raise ValueError(f"{where} refers to {value}, which is not a single value")
    return named


def _section(name: str, values: dict[str, Any]) -> Any:
    known = [option.name for option in section_options(SECTIONS[name])]
    for option, value in values.items():
        if option not in known:
            raise ValueError(no_such(f"{name} option", option, known, elsewhere=paths_with(option, without=name)))
        if value == _MISSING:
            raise ValueError(f"{name}.{option} has no value yet; set {name}.{option}=")
    return SECTIONS[name](**values)


def completed(kind: str, section: dict[str, Any], *, where: str) -> dict[str, Any]:
    """Return a section with all options, in the order of the component's signature.

    Raises:
        ValueError: no such component, or an option without a default is missing.
    """
    result = {"name": section["name"]}
    for name, option in _options(kind, section["name"]).items():
        value = section.get(name, option.default)
        if value is REQUIRED:
            meaning = f" ({option.doc})" if option.doc else ""
            raise ValueError(f"{kind} {section['name']!r} needs the option {name!r}{meaning}")
        inner = _kind_within(option, value)
        path = f"{where}.{name}"
        result[name] = value if inner is None else completed(inner, _as_section(value, path), where=path)
    return result


def checked_choice(kind: str, section: dict[str, Any], *, where: str) -> Choice:
    """Return a completed section as a `Choice`, each option checked against its annotation and its range.

    Raises:
        ValueError: an option has another type or is out of range.
    """
    fitted: dict[str, Any] = {}
    for name, option in _options(kind, section["name"]).items():
        path = f"{where}.{name}"
        inner = _kind_within(option, section[name])
        if inner is not None:
            fitted[name] = checked_choice(inner, section[name], where=path)
        elif kind == "model" and name in _LAYER_OPTIONS:
            fitted[name] = _checked_layers(section[name], where=path)
        else:
            fitted[name] = checked_option(path, section[name], option)
    return Choice(section["name"], fitted)


# Note: [layers as written]
# A config holds the entries of `model.layers` as they were written. They are completed when a model is built. Completed
# entries would hide an override of a saved config: attention.soft_cap=null must also apply to the layers that differ.


def _checked_layers(entries: Any, *, where: str) -> tuple[dict[str, Any], ...]:
    """Return the entries of `model.layers` as they were written, with each `at` as text."""
    if not isinstance(entries, (list, tuple)):
        raise ValueError(f"{where} must be a list of mappings {{at: ..., component: ...}}, got {shown(entries)}")
    for index, entry in enumerate(entries):
        if not isinstance(entry, dict) or type(entry.get("at")) not in (int, str) or len(entry) < 2:
            raise ValueError(
                f"{where}[{index}] must say at which layers, by an index or a slice (0, 1::2), and what changes: "
                f"{{at: 1::2, feedforward: ...}}, got {shown(entry)}"
            )
        for kind in entry.keys() - {"at", *PARTS}:
            raise ValueError(no_such(f"component in {where}[{index}]", kind, PARTS))
    return tuple({**entry, "at": str(entry["at"])} for entry in entries)


def with_layer_changes(config: Config) -> Choice:
    """Return the `Choice` of a config's model, with its layers as `LayerChange`s of completed and checked components.

    An entry changes a component in the same way as an override.

    Raises:
        ValueError: no such component or option; or an option has another type or is out of range.
    """
    model = config.model
    changes = {
        option: tuple(
            _layer_change(config, entry, f"model.{option}[{index}]")
            for index, entry in enumerate(model.options[option])
        )
        for option in _LAYER_OPTIONS
        if option in model.options
    }
    return Choice(model.name, {**model.options, **changes})


def _layer_change(config: Config, entry: dict[str, Any], where: str) -> LayerChange:
    choices: dict[str, Choice] = {}
    for kind, change in entry.items():
        if kind == "at":
            continue
        path = f"{where}.{kind}"
        # The block is an option of the model. The other components are sections.
        base = config.model.options.get("block") if kind == "block" else getattr(config, kind)
        try:
            before = {} if base is None else _as_section(plain_copy(base), path)
            section = completed(kind, changed(kind, before, _as_section(change, path), where=path), where=path)
        except ValueError as error:
            # Some errors do not name the path, and only some layers have this component.
            raise ValueError(str(error) if path in str(error) else f"{path}: {error}") from error
        choices[kind] = checked_choice(kind, section, where=path)
    return LayerChange(entry["at"], **choices)


def _options(kind: str, name: str) -> dict[str, Option]:
    return {option.name: option for option in options(kind, name)}


def _kind_within(option: Option, value: Any) -> str | None:
    """Return the kind of the component that an option holds, or None if it holds none."""
    wanted = alternatives(option.annotation)
    if value is None and type(None) in wanted:
        return None
    return option.kind if Choice in wanted else None


def _as_section(value: Any, where: str) -> dict[str, Any]:
    """Return a component as a section. The value is its name, its section or its `Choice`."""
    if isinstance(value, Choice):
        return {"name": value.name, **value.options}
    if isinstance(value, str):
        return {"name": value}
    if isinstance(value, dict):
        return value
    if value is REQUIRED:
        return {}
    raise ValueError(f"{where} must be a name or a mapping of options, got {shown(value)}")
