"""`${section.option}`: a value that is another option's value."""

from typing import Any

from .values import REFERENCE

__all__ = ["resolved"]


def resolved(sections: dict[str, Any]) -> dict[str, Any]:
    """Return the sections with every reference replaced by what it names.

    Raises:
        ValueError: a reference names nothing, a whole section or list, or in the end itself.

    >>> resolved({"model": {"dropout": 0.1}, "feedforward": {"dropout": "${model.dropout}"}})
    {'model': {'dropout': 0.1}, 'feedforward': {'dropout': 0.1}}
    """
    return {name: _resolved(section, name, sections) for name, section in sections.items()}


def _resolved(value: Any, where: str, sections: dict[str, Any]) -> Any:
    if isinstance(value, dict):
        return {key: _resolved(entry, f"{where}.{key}", sections) for key, entry in value.items()}
    if isinstance(value, list):
        return [_resolved(entry, f"{where}[{place}]", sections) for place, entry in enumerate(value)]
    seen: list[str] = []
    while isinstance(value, str) and (reference := REFERENCE.fullmatch(value)):
        if value in seen:
            raise ValueError(f"{where} refers to itself, through {' -> '.join(seen)}; give it a value")
        seen.append(value)
        value = _find(reference[1], where, sections)
    return value


def _find(path: str, where: str, sections: dict[str, Any]) -> Any:
    found: Any = sections
    for key in path.split("."):
        if not isinstance(found, dict) or key not in found:
            raise ValueError(f"{where} refers to ${{{path}}}, which this config does not have")
        found = found[key]
    # Single values only: a list of references to lists of references would grow without bound.
    if isinstance(found, (dict, list)):
        raise ValueError(f"{where} refers to ${{{path}}}, which is no single value")
    return found
