"""What the group files make together: which groups there are, what each offers, and every section that they give."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .folders import COMPONENT_SECTIONS, PRIMARY, SHIPPED, load, names_in, open_folders
from .hydra_private import compose_files
from .overrides import Layer, check_group
from .renamed import check_renamed
from .sections import changed

__all__ = ["choices", "chosen_component", "composed"]


def choices(group: str, searchpath: Sequence[str] = ()) -> tuple[str, ...]:
    """Return what `group=` may be, sorted: the files and, for a group of components, every registered one.

    Args:
        group: one of `GROUPS`.
        searchpath: folders of your own beside the shipped one, as `hydra.searchpath` takes them.

    Raises:
        ValueError, OSError: there is no such group; or the search path is wrong, see `open_folders`.

    >>> choices("fusion")
    ('auto', 'eager', 'inductor', 'nvfuser', 'off', 'triton')
    """
    check_group(group)
    return names_in(open_folders(searchpath), group)


def composed(presets: Mapping[str, str], folders: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Return every section as the files make it, with its references unresolved and its defaults left out.

    Args:
        presets: group -> choice, for groups that are not of components; the rest is as the model's file chooses.
        folders: where the files are, as `open_folders` returns them.

    Raises:
        OSError, ValueError: a group has no such choice, or a user's file is wrong.
    """
    for group, choice in presets.items():
        _check(folders, group, choice)
    return compose_files(folders, PRIMARY, dict(presets))


def chosen_component(group: str, choice: str, folders: Sequence[Path]) -> dict[str, Any]:
    """Return the section that a choice in a group of components stands for: its file's, or the bare registered name.

    Raises:
        OSError, ValueError: as `composed`.
    """
    _check(folders, group, choice)
    section = compose_files(folders, f"{group}/{choice}", {})[group]
    assert isinstance(section, dict)
    return section


def _check(folders: Sequence[Path], group: str, choice: str, *, above: tuple[str, ...] = ()) -> None:
    """Check what a user's file sets, and the files that it builds on.

    A file sets options of the components that it ends up with when it is chosen alone. One that builds on it may choose
    others. Files are merged as Hydra merges them: what the first one sets stays then, even where it is the default of
    the old component and not of the new one, and only what the new one does not know falls away.
    """
    name = f"{group}/{choice}"
    if name in above:
        raise ValueError(f"{name} builds on itself: {' -> '.join((*above, name))}")
    file = load(folders, group, choice)
    if file.path is None or file.path.is_relative_to(SHIPPED):
        return
    for entry in file.defaults:
        if isinstance(entry, dict):
            ((override, other),) = entry.items()
            _check(folders, override.partition("/")[2], other, above=(*above, name))
        elif entry != "_self_":
            _check(folders, group, entry, above=(*above, name))
    try:
        _check_options(folders, group, choice, file.content if file.is_global else {group: file.content})
    except ValueError as error:
        raise ValueError(f"{file.path}: {error}") from error


def _check_options(folders: Sequence[Path], group: str, choice: str, content: Mapping[str, Any]) -> None:
    for other, section in content.items():
        check_group(other)
        if group == "model" and other not in COMPONENT_SECTIONS:
            # The file of that group is merged later, and would win without a word.
            raise ValueError(
                f"a file of model sets the model and its parts, not {other}: write a file {other}/mine.yaml, and "
                f"choose it beside the model, with {other}=mine"
            )
        if not isinstance(section, dict):
            raise ValueError(
                f"{other} must be a mapping of options, got {section!r}; a choice is an entry of defaults: "
                f"override /{other}: {section}"
            )
    primary, presets = (PRIMARY, {group: choice}) if group == "model" else (f"{group}/{choice}", {})
    result = compose_files(folders, primary, presets)
    check_renamed([Layer(settings=dict(content))], model=str(result.get("model", {}).get("name")))
    for other, section in content.items():
        if other in COMPONENT_SECTIONS:
            changed(other, {}, {**section, "name": result[other].get("name")}, where=other)
