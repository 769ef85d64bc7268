"""Sections that name a component: how one is changed, swapped, and checked against the component's own signature.

A section is a plain dict {"name": a registered name, option: value, ...}; an option that is a component again, as a
model's block or the expert of a mixture, is such a dict or the bare name.
"""

from typing import Any

from ..components import REQUIRED, Choice, Option, get, names, options
from ..names import no_such
from .annotations import alternatives, checked

__all__ = ["as_section", "changed", "checked_choice", "completed"]


def changed(kind: str, section: dict[str, Any], changes: dict[str, Any], *, where: str) -> dict[str, Any]:
    """Return a section with changes made; a change of `name` swaps the component first.

    Raises:
        ValueError: no such component or option.

    >>> changed("feedforward", {"name": "gated_mlp", "dropout": 0.1}, {"name": "mlp"}, where="feedforward")
    {'name': 'mlp', 'dropout': 0.1}
    """
    name = changes.get("name", section.get("name"))
    if not isinstance(name, str):
        raise ValueError(f"{where} must name a {kind}, got {name!r}; there are: {', '.join(names(kind))}")
    known = _options(kind, name)
    if name != section.get("name"):
        section = {"name": name, **_kept(kind, section, known)}
    result = dict(section)
    for key, value in changes.items():
        if key == "name":
            continue
        if key not in known:
            raise ValueError(no_such(f"{name} option", key, known))
        inner = _kind_within(known[key], value)
        if inner is not None:
            path = f"{where}.{key}"
            before = section.get(key, known[key].default)
            # What is chosen in place of none begins at the new component's defaults.
            value = changed(inner, as_section(before or {}, path), as_section(value, path), where=path)
        result[key] = value
    return result


def completed(kind: str, section: dict[str, Any], *, where: str) -> dict[str, Any]:
    """Return a section with every option that it leaves out at the component's default.

    Raises:
        ValueError: no such component, or an option without a default is left out.

    >>> completed("position", {"name": "sinusoidal"}, where="position")
    {'name': 'sinusoidal', 'base': 10000.0}
    """
    result = {"name": section["name"]}
    for name, option in _options(kind, section["name"]).items():
        value = section.get(name, option.default)
        if value is REQUIRED:
            meaning = f" ({option.doc})" if option.doc else ""
            raise ValueError(f"{kind} {section['name']!r} needs the option {name!r}{meaning}")
        path = f"{where}.{name}"
        inner = _kind_within(option, value)
        result[name] = value if inner is None else completed(inner, as_section(value, path), where=path)
    return result


def checked_choice(kind: str, section: dict[str, Any], *, where: str) -> Choice:
    """Return a completed section as a choice, each option checked by its annotation.

    Raises:
        ValueError: an option has another type.

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
        fitted[name] = checked(path, section[name], option.annotation)
        if option.range is not None and fitted[name] is not None:
            option.range.check(path, fitted[name])
        if option.kind is not None and isinstance(fitted[name], str):
            get(option.kind, fitted[name])  # an activation by its name: a misspelt one is found before it is built
    return Choice(section["name"], fitted)


def _kept(kind: str, section: dict[str, Any], known: dict[str, Option]) -> dict[str, Any]:
    # Note: [what a swap keeps]
    # What was set away from the old component's defaults is kept, as far as the new one has an option of that name; for
    # the rest the new one's defaults hold. So gpt_nano's dropout stays when its MLP becomes a gated one, its activation
    # becomes the gated one's own, and what only the old component knows falls away. Values are compared, not where they
    # came from: a file that spells every default out is swapped like one that leaves them out.
    if "name" not in section:
        return {}
    before = _options(kind, section["name"])
    return {
        key: value for key, value in section.items() if key in before and key in known and value != before[key].default
    }


def _options(kind: str, name: str) -> dict[str, Option]:
    return {option.name: option for option in options(kind, name)}


def _kind_within(option: Option, value: Any) -> str | None:
    """Return the kind of the component that an option's value is, with options of its own, or None where it is none."""
    wanted = alternatives(option.annotation)
    if value is None and type(None) in wanted:
        return None
    return option.kind if Choice in wanted else None


def as_section(value: Any, where: str) -> dict[str, Any]:
    """Return a component, by its name, its section or its `Choice`, as a section.

    Raises:
        ValueError: it is something else.
    """
    if isinstance(value, Choice):
        return {"name": value.name, **value.options}
    if isinstance(value, str):
        return {"name": value}
    if isinstance(value, dict):
        return value
    if value is REQUIRED:
        return {}
    raise ValueError(f"{where} must be a name or a mapping of options, got {value!r}")
