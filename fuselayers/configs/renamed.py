"""What has another name than in an older fuselayers: a config that still has the old one is told the new one."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ..components import names, options
from .overrides import Layer
from .values import REFERENCE

__all__ = ["check_renamed"]


@dataclass(frozen=True)
class Rename:
    """One renamed option or component.

    Attributes:
        old: its old path; what lies below it is renamed with it.
        new: its new path.
        values: old value -> new value, where only these are renamed; empty where every value stays as it is.
    """

    old: str
    new: str
    values: Mapping[str, str] = field(default_factory=dict)


_RENAMES: Final = (
    # A model's own options, until positions and residual styles became groups.
    Rename("model.position", "position"),
    Rename("model.block", "residual", {"pre_norm": "pre", "post_norm": "post"}),
)


def check_renamed(layers: Sequence[Layer], *, model: str) -> None:
    """Refuse layers that hold old names.

    Args:
        layers: as a file, a mapping or overrides gave them.
        model: the registered name of their model; an option that it has under an old name is its own.

    Raises:
        ValueError: one text for all of them, each with what to write instead.

    >>> check_renamed([Layer(settings={"model": {"position": "rotary"}})], model="decoder")
    Traceback (most recent call last):
    ValueError: model.position is now position: write position=rotary
    """
    found = [
        text
        for layer in layers
        for group, section in layer.settings.items()
        for path, value in _stated(group, section)
        for text in (*_renamed(path, value, model), *_renamed_reference(path, value, model))
    ]
    if found:
        older = "this config is of an older fuselayers: " if len(found) > 1 else ""
        raise ValueError(older + "; ".join(found))


def _stated(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Every value with its path; a component's name stands at the component's own."""
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from _stated(path if key == "name" else f"{path}.{key}", entry)
    else:
        yield path, value


def _renamed(path: str, value: Any, model: str) -> Iterator[str]:
    for rename in _RENAMES:
        below = path.removeprefix(rename.old)
        if below != path and below[:1] in ("", ".") and not _is_known(rename.old, value, model):
            if not rename.values:
                yield f"{path} is now {rename.new}{below}: write {rename.new}{below}={_written(value)}"
            elif not below and value in rename.values:
                new = rename.values[value]
                yield f"{path}={value} is now {rename.new}={new}: write {rename.new}={new}"


def _renamed_reference(path: str, value: Any, model: str) -> Iterator[str]:
    reference = REFERENCE.fullmatch(value) if isinstance(value, str) else None
    for rename in _RENAMES:
        below = reference[1].removeprefix(rename.old) if reference else ""
        if reference and below[:1] == "." and not rename.values and not _is_known(rename.old, value, model):
            yield f"{path} refers to {value}, which is now {rename.new}{below}: write ${{{rename.new}{below}}}"


def _is_known(path: str, value: Any, model: str) -> bool:
    """Whether the model has this option itself, and the value is one of its names, if it is a component."""
    option = path.partition(".")[2]
    if model not in names("model") or option not in {known.name for known in options("model", model)}:
        return False
    return option != "block" or value in names("block")


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
