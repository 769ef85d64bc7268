"""The YAML files that come with the library: which groups there are, what each offers, and what they make together."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ..components import names
from ..names import no_such
from .hydra_private import compose_files

__all__ = ["COMPONENT_GROUPS", "GROUPS", "check_group", "choices", "chosen_component", "shipped"]

GROUPS: Final = ("model", "feedforward", "attention", "norm", "residual", "position", "fusion", "train", "data")
# A choice in these names a registered component as well as a file: `feedforward=mine` needs no YAML.
COMPONENT_GROUPS: Final = ("feedforward", "attention", "norm", "residual", "position")

_FOLDER: Final = Path(__file__).resolve().parent / "groups"


def check_group(group: str) -> None:
    """Raise ValueError, with the nearest one, unless there is such a config group."""
    if group not in GROUPS:
        raise ValueError(no_such("config group", group, GROUPS))


def choices(group: str) -> tuple[str, ...]:
    """Return what `group=` may be, sorted: the shipped files and, for a group of components, every registered one.

    Raises:
        ValueError: there is no such group.

    >>> choices("model")
    ('bert_base', 'gpt2_small', 'gpt_nano', 'llama_tiny')
    """
    check_group(group)
    found = {path.stem for path in (_FOLDER / group).glob("*.yaml")}
    return tuple(sorted(found.union(names(group) if group in COMPONENT_GROUPS else ())))


def shipped(presets: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return every section as the shipped files make it, with its references unresolved and its defaults left out.

    Args:
        presets: group -> choice, for groups that are not of components; the rest is as the model's file chooses.

    Raises:
        ValueError: a group has no such choice.
    """
    for group, choice in presets.items():
        _check_choice(group, choice)
    return compose_files(_FOLDER, "config", dict(presets))


def chosen_component(group: str, choice: str) -> dict[str, Any]:
    """Return the section that a choice in a group of components stands for: its file's, or the bare registered name.

    Raises:
        ValueError: the group has no such choice.
    """
    _check_choice(group, choice)
    if not (_FOLDER / group / f"{choice}.yaml").exists():
        return {"name": choice}
    section = compose_files(_FOLDER, f"{group}/{choice}", {})[group]
    assert isinstance(section, dict)
    return section


def _check_choice(group: str, choice: str) -> None:
    known = choices(group)
    # A name from a list of known ones is also what keeps `model=../../somewhere` from being a path.
    if choice not in known:
        raise ValueError(no_such(group, choice, known))
