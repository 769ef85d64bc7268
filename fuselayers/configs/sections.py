"""Sections that name a component: change one, swap its component, complete it, check it against the signature.

A section is a plain dict {"name": a registered name, option: value, ...}. An option may hold a component too, such as a
model's block or the expert of a mixture: it is such a dict again, or the bare name. A section holds only what somebody
wrote; `completed` adds the defaults.
"""

from collections.abc import Container, Iterator
from typing import Any, Final

from ..components import REQUIRED, Choice, LayerChange, Option, names, options
from ..components.model.layers import PARTS, matching_layers
from ..components.registry import no_option
from ..names import no_such, shown
from .group_files import paths_with
from .schemas import Config
from .values import alternatives, checked_option, plain_copy

# The options of models that hold lists of {at: which layers, component: its name or options}.
_LAYER_OPTIONS: Final = ("layers", "decoder_layers")
# A saved config must stay within the limits of `read_yaml` and `plain_copy`.
_MOST_LAYERS: Final = 200


def changed(
    kind: str, section: dict[str, Any], changes: dict[str, Any], *, where: str, notes: list[str] | None = None
) -> dict[str, Any]:
    """Return a section with changes made; a change of `name` swaps the component first.

    A swap keeps every option that the new component has too. Dropped options and changed defaults go into `notes`.

    Raises:
        ValueError: no such component or option.

    >>> notes = []
    >>> changed("feedforward", {"name": "mlp", "bias": True}, {"name": "gated_mlp"}, where="feedforward", notes=notes)
    {'name': 'gated_mlp', 'bias': True}
    >>> notes
    ["feedforward=gated_mlp replaces mlp: by default expansion=2.6666666666666665 (was 4.0), activation='silu' ..."]
    """
    name = changes.get("name", section.get("name"))
    if not isinstance(name, str):
        raise ValueError(f"{where} must name a {kind}, got {shown(name)}; there are: {', '.join(names(kind))}")
    known = _options(kind, name)
    result = {**section, "name": name}
    if section.get("name", name) != name:
        result = {"name": name, **{key: value for key, value in section.items() if key in known}}
        if notes is not None:
            notes += _swap_notes(kind, section, {**result, **changes}, where)
    for key, value in changes.items():
        if key == "name":
            continue
        if key not in known:
            raise ValueError(no_option(kind, name, key, elsewhere=paths_with(key, without=kind)))
        inner = _kind_within(known[key], value)
        if inner is not None:
            path = f"{where}.{key}"
            before = _as_section(result.get(key, known[key].default) or {}, path)
            value = changed(inner, before, _as_section(value, path), where=path, notes=notes)
        result[key] = value
    return result


def fitting(kind: str, section: dict[str, Any], *, where: str, notes: list[str]) -> dict[str, Any]:
    """Return a section that Hydra composed, without the options of another component.

    Hydra merges files: llama_tiny.yaml sets multiple_of of its gated_mlp, and still does with feedforward=mlp.

    Raises:
        ValueError: an option that no component of the kind has, or no such component.
    """
    name = section.get("name")
    if isinstance(name, str) and (unknown := section.keys() - {"name", *_options(kind, name)}):
        dropped = unknown & {option.name for other in names(kind) for option in options(kind, other)}
        notes += [
            f"{where}: {name} has no option {key}, so {key}={shown(section[key])} is dropped" for key in sorted(dropped)
        ]
        section = {key: value for key, value in section.items() if key not in dropped}
    return changed(kind, {}, section, where=where)


def written(kind: str, section: dict[str, Any], left_at_default: Container[str], *, where: str) -> dict[str, Any]:
    """Return a completed section without the options whose paths are in `left_at_default`, those that nobody wrote.

    Such an option counts as written if it differs from the default: the default changed, or the config was edited.
    """
    known = _options(kind, section["name"])
    result = {"name": section["name"]}
    for key, value in section.items():
        if key == "name":
            continue
        path = f"{where}.{key}"
        default = known[key].default if key in known else REQUIRED
        inner = _kind_within(known[key], value) if key in known else None
        if inner is not None:
            value, default = _as_section(value, path), _as_section(default, path)
            if "name" in value:  # if not, it adds to the default component
                value = written(inner, value, left_at_default, where=path)
        if path not in left_at_default or default is REQUIRED or value != plain_copy(default):
            result[key] = value
    return result


def option_paths(kind: str, section: dict[str, Any], *, where: str) -> Iterator[str]:
    """Yield the path of every option of a section's component, and of the components within it.

    A section that names no registered component may have the options of all.
    """
    name = section.get("name")
    for component in [name] if name in names(kind) else names(kind):
        for option in options(kind, component):
            path = f"{where}.{option.name}"
            yield path
            value = section.get(option.name, option.default)
            inner = None if value is REQUIRED else _kind_within(option, value)
            if inner is not None:
                yield from option_paths(inner, _as_section(value, path), where=path)


def completed(
    kind: str, section: dict[str, Any], *, where: str, left_at_default: set[str] | None = None
) -> dict[str, Any]:
    """Return a section with every option, in the component's order. `left_at_default` gets the paths of the defaults.

    Raises:
        ValueError: no such component, or an option without a default is missing.

    >>> completed("position", {"name": "sinusoidal"}, where="position")
    {'name': 'sinusoidal', 'base': 10000.0}
    """
    result = {"name": section["name"]}
    for name, option in _options(kind, section["name"]).items():
        path = f"{where}.{name}"
        value = section.get(name, option.default)
        if value is REQUIRED:
            meaning = f" ({option.doc})" if option.doc else ""
            raise ValueError(f"{kind} {section['name']!r} needs the option {name!r}{meaning}")
        if left_at_default is not None and name not in section:
            left_at_default.add(path)
        inner = _kind_within(option, value)
        if inner is not None:
            value = completed(inner, _as_section(value, path), where=path, left_at_default=left_at_default)
        result[name] = value
    return result


def checked_choice(kind: str, section: dict[str, Any], *, where: str) -> Choice:
    """Return a completed section as a choice, each option checked by its annotation and its range.

    Raises:
        ValueError: an option has another type or is out of range.

    >>> checked_choice("position", {"name": "sinusoidal", "base": 50}, where="position")
    Choice(name='sinusoidal', options={'base': 50.0})
    """
    fitted: dict[str, Any] = {}
    for name, option in _options(kind, section["name"]).items():
        path = f"{where}.{name}"
        inner = _kind_within(option, section[name])
        if inner is not None:
            fitted[name] = checked_choice(inner, section[name], where=path)
            continue
        fitted[name] = checked_option(path, section[name], option)
        if kind == "model" and name in _LAYER_OPTIONS:
            fitted[name] = _checked_layers(fitted[name], option=name)
    return Choice(section["name"], fitted)


# Note: [layers as written]
# A config holds the entries of `model.layers` as they were written, and completes them when a model is built. Complete
# entries would hide an override of a saved config: attention.soft_cap=null must reach the layers that differ too.


def _checked_layers(entries: Any, *, option: str) -> tuple[dict[str, Any], ...]:
    """Return the entries of `model.layers` as they were written, each `at` as text."""
    if not isinstance(entries, (list, tuple)):
        raise ValueError(f"model.{option} must be a list of mappings {{at: ..., component: ...}}, got {shown(entries)}")
    if len(entries) > _MOST_LAYERS:
        raise ValueError(
            f"model.{option} may have {_MOST_LAYERS} entries, got {len(entries):,}; "
            f"one entry may change many layers: {{at: 1::2, ...}}"
        )
    return tuple(_checked_layer(entry, f"model.{option}[{index}]") for index, entry in enumerate(entries))


def _checked_layer(entry: Any, where: str) -> dict[str, Any]:
    if not isinstance(entry, dict) or "at" not in entry or len(entry) < 2:
        raise ValueError(
            f"{where} must say at which layers and what changes: {{at: 1::2, feedforward: ...}}, got {shown(entry)}"
        )
    at = entry["at"]
    if isinstance(at, bool) or not isinstance(at, (int, str)):
        raise ValueError(f"{where}.at must be an index or a slice such as 0 or 1::2, got {shown(at)}")
    for kind in entry:
        if kind != "at" and kind not in PARTS:
            raise ValueError(no_such(f"component in {where}", kind, PARTS))
    return {**entry, "at": str(at)}


def with_layer_changes(config: Config) -> Choice:
    """Return the choice of a config's model with its layers as `LayerChange`s, each component complete and checked.

    An entry changes a component as an override would: it keeps the options that were written for the other layers.

    Raises:
        ValueError: no such component or option; an option has another type or is out of range; or an `at` matches no
            layer.
    """
    model = config.model
    changes: dict[str, tuple[LayerChange, ...]] = {}
    for option in _LAYER_OPTIONS:
        if option not in model.options:
            continue
        changes[option] = tuple(
            _layer_change(config, entry, f"model.{option}[{index}]")
            for index, entry in enumerate(model.options[option])
        )
        depths = [model.options.get(name) for name in ("num_decoder_layers", "num_layers")]
        depth = (depths[0] or depths[1]) if option == "decoder_layers" else depths[1]
        if depth is not None:
            for change in changes[option]:
                matching_layers(change.at, depth)
    return Choice(model.name, {**model.options, **changes})


def _layer_change(config: Config, entry: dict[str, Any], where: str) -> LayerChange:
    choices: dict[str, Choice] = {}
    for kind, change in entry.items():
        if kind == "at":
            continue
        path = f"{where}.{kind}"
        # The block is an option of the model, the other components are sections.
        base = config.model.options.get("block") if kind == "block" else getattr(config, kind)
        try:
            before = _as_section(plain_copy(base), path) if base is not None else {}
            if before:
                before = written(kind, before, config.left_at_default, where="model.block" if kind == "block" else kind)
            section = completed(kind, changed(kind, before, _as_section(change, path), where=path), where=path)
        except ValueError as error:
            # The text names the option alone, and here only some layers may have the component.
            raise ValueError(str(error) if path in str(error) else f"{path}: {error}") from error
        choices[kind] = checked_choice(kind, section, where=path)
    return LayerChange(entry["at"], **choices)


def _swap_notes(kind: str, before: dict[str, Any], after: dict[str, Any], where: str) -> list[str]:
    """Return one line about what a swap changes: options that take another default, options that are dropped."""
    old, new = _options(kind, before["name"]), _options(kind, after["name"])
    parts = [
        f"{name}={option.default!r} (was {old[name].default!r})"
        for name, option in new.items()
        if name in old and name not in after and option.default not in (old[name].default, REQUIRED)
    ]
    notes = [f"by default {', '.join(parts)}"] if parts else []
    dropped = [f"{key}={shown(value)}" for key, value in before.items() if key != "name" and key not in new]
    if dropped:
        notes.append(f"dropped {', '.join(dropped)}, which {after['name']} does not have")
    return [f"{where}={after['name']} replaces {before['name']}: {'; '.join(notes)}"] if notes else []


def _options(kind: str, name: str) -> dict[str, Option]:
    return {option.name: option for option in options(kind, name)}


def _kind_within(option: Option, value: Any) -> str | None:
    """Return the kind of the component that an option holds, or None where it holds no component."""
    wanted = alternatives(option.annotation)
    if value is None and type(None) in wanted:
        return None
    return option.kind if Choice in wanted else None


def _as_section(value: Any, where: str) -> dict[str, Any]:
    """Return a component, given by its name, its section or its `Choice`, as a section."""
    if isinstance(value, Choice):
        return {"name": value.name, **value.options}
    if isinstance(value, str):
        return {"name": value}
    if isinstance(value, dict):
        return value
    if value is REQUIRED:
        return {}
    raise ValueError(f"{where} must be a name or a mapping of options, got {shown(value)}")
