"""Folders of group files: the shipped one, then those of `hydra.searchpath`. Files are read as strictly as a source.

A folder holds one folder per group, and a group's holds its choices:

    /my/configs/model/mine.yaml         with # @package _global_: chooses and sets its parts too
    /my/configs/feedforward/wide.yaml   sets options of its own group
    /my/configs/train/long.yaml

What a file sets wins over the files that its `defaults` name; so does what a model's file sets over the files of the
parts that it chooses, as Hydra merges them.
"""

# Note: [who wins] Hydra looks through its folders in their order, the application's own first and those of
# `hydra.searchpath` after it, and takes the first file of a name. So a shipped name keeps its meaning. Where Hydra
# would leave a file that a shipped one hides aside without a word, we refuse it. A registered component is chosen by
# its name as if it were shipped, with a file or without one, so its name is refused too.

import functools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..components import names
from ..components.registry import of_another_kind
from ..names import no_such
from .values import plain_copy
from .yaml_text import read

__all__ = [
    "COMPONENT_GROUPS",
    "COMPONENT_SECTIONS",
    "GROUPS",
    "PRIMARY",
    "SHIPPED",
    "GroupFile",
    "load",
    "names_in",
    "open_folders",
]

GROUPS: Final = ("model", "feedforward", "attention", "norm", "residual", "position", "fusion", "train", "data")
# A choice in these names a registered component as well as a file: `feedforward=mine` needs no YAML.
COMPONENT_GROUPS: Final = ("feedforward", "attention", "norm", "residual", "position")
# The sections that name a component.
COMPONENT_SECTIONS: Final = ("model", *COMPONENT_GROUPS)
SHIPPED: Final = Path(__file__).resolve().parent / "groups"
# The file that chooses one of each group; it is in none.
PRIMARY: Final = "config"

_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_HEADER: Final = re.compile(r"# *@package +(\S+) *")
_OVERRIDE: Final = re.compile(r"override +/(\w+)")


@dataclass(frozen=True)
class GroupFile:
    """What a group file says.

    Attributes:
        path: where it is; None for a registered component without a file.
        is_global: whether its content is of every group ("# @package _global_"), or of its own.
        defaults: the files that it builds on and the choices that it makes, as Hydra has them.
        content: its own options, plain values.
    """

    path: Path | None
    is_global: bool
    defaults: list[Any]
    content: dict[str, Any]


def open_folders(entries: Any) -> tuple[Path, ...]:
    """Return the shipped folder and those that a search path names, in the order in which they are looked through.

    Args:
        entries: of `hydra.searchpath`: folders, relative ones below the working directory, or "file://" and one.

    Raises:
        ValueError: no list of texts, another scheme than file://, a folder without groups, or a file that may not be
            there: of a name that is shipped or registered, of one that no override can write, or outside of the folder.
        OSError: there is no such folder.
    """
    if not isinstance(entries, (list, tuple)) or not all(isinstance(entry, str) for entry in entries):
        raise ValueError(f"hydra.searchpath must be a list of folders, as [/my/configs], got {entries!r}")
    return (SHIPPED, *map(_opened, entries))


def names_in(folders: Sequence[Path], group: str) -> tuple[str, ...]:
    """Return what may be chosen in a group, sorted: the files and, for a group of components, every registered one."""
    found = {name for folder in folders for name in _files(folder, group)}
    return tuple(sorted(found.union(names(group) if group in COMPONENT_GROUPS else ())))


def load(folders: Sequence[Path], group: str, name: str) -> GroupFile:
    """Return the first file of a group that has the name, or the bare component of that name.

    Args:
        folders: as `open_folders` returns them.
        group: one of `GROUPS`, or "" for the primary file.
        name: its choice.

    Raises:
        OSError: a file cannot be read.
        ValueError: there is none of that name; or the file is no YAML mapping of plain values, has another package than
            its own group (and, for a model, `_global_`), or builds on what there is not.
    """
    if not group:
        return _read_shipped(SHIPPED / f"{name}.yaml", group)
    # A name from a list of known ones is also what keeps `model=../../somewhere` from being a path.
    _check_name(folders, group, name)
    for folder in folders:
        path = _files(folder, group).get(name)
        if path is not None:
            return _read_shipped(path, group) if folder == SHIPPED else _read(path, folders, group)
    return GroupFile(None, is_global=False, defaults=[], content={"name": name})


def _check_name(folders: Sequence[Path], group: str, name: str) -> None:
    known = names_in(folders, group)
    if name not in known:
        raise ValueError(no_such(group, name, known) + of_another_kind(group, name))


def _files(folder: Path, group: str) -> dict[str, Path]:
    """Name -> file, for the files that a folder has in a group; none where it has no such group."""
    return {path.stem: path for path in sorted((folder / group).glob("*.yaml")) if not path.name.startswith(".")}


@functools.cache
def _read_shipped(path: Path, group: str) -> GroupFile:
    # These do not change while the program runs, and to read YAML is most of what `compose` does.
    return _read(path, [SHIPPED], group)


def _read(path: Path, folders: Sequence[Path], group: str) -> GroupFile:
    content = read(path)
    try:
        # The text of a header is a comment: no reader of YAML sees it.
        header = _package(path.read_text(encoding="utf-8"))
        if header is not None and (header != "_global_" or group != "model"):
            raise ValueError(
                f"the package {header!r} is refused: a file sets options of its own group, and only a file of model "
                "those of its parts too, with # @package _global_"
            )
        content = plain_copy({} if content is None else content)
        if not isinstance(content, dict):
            raise ValueError(f"a group file must be a mapping of options, got {content!r}")
        defaults = content.pop("defaults", [])
        if not isinstance(defaults, list):
            raise ValueError(f"defaults must be a list, got {defaults!r}")
        for entry in defaults:
            _check_default(entry, folders, group)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return GroupFile(path, is_global=header is not None, defaults=defaults, content=content)


def _check_default(entry: Any, folders: Sequence[Path], group: str) -> None:
    if entry == "_self_":
        return
    if isinstance(entry, str) and group:
        _check_name(folders, group, entry)
        return
    if isinstance(entry, dict) and len(entry) == 1:
        ((key, choice),) = entry.items()
        override = _OVERRIDE.fullmatch(key)
        chosen = override[1] if override else key
        # The primary file chooses first; a model's file chooses anew.
        may_choose = (override and chosen in COMPONENT_GROUPS) if group == "model" else (not group and chosen in GROUPS)
        if may_choose and isinstance(choice, str):
            _check_name(folders, chosen, choice)
            return
    raise ValueError(
        f"an entry of defaults must be the name of a file of the same group or, in a file of model, "
        f"override /part: choice, got {entry!r}"
    )


def _opened(entry: str) -> Path:
    scheme, separator, rest = entry.partition("://")
    if separator and scheme != "file":
        raise ValueError(
            f"hydra.searchpath: {entry!r} is refused: only folders are looked through, as /my/configs or "
            f"file:///my/configs, not {scheme}://"
        )
    folder = Path(os.path.expanduser(rest if separator else entry))
    if not folder.is_dir():
        raise NotADirectoryError(f"hydra.searchpath: there is no folder {folder} (from {Path.cwd()})")
    folder = folder.resolve()
    if not any((folder / group).is_dir() for group in GROUPS):
        raise ValueError(
            f"hydra.searchpath: {folder} holds no folder of a group; a file is found as model/mine.yaml, and the "
            f"groups are: {', '.join(GROUPS)}"
        )
    for group in GROUPS:
        for name, path in _files(folder, group).items():
            _check_file(folder, group, name, path)
    return folder


def _check_file(folder: Path, group: str, name: str, path: Path) -> None:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{path}: the name of a group file must be a letter, then letters, digits, _ and -; rename it")
    if name in _files(SHIPPED, group):
        raise ValueError(
            f"{path}: {group}={name} is the shipped file, which hides this one, as in Hydra; give it another name"
        )
    if group in COMPONENT_SECTIONS and name in names(group):
        raise ValueError(
            f"{path}: {name!r} is a registered {group}, which this file would hide; give it another name, such as "
            f"my_{name}.yaml"
        )
    real = path.resolve()
    if not real.is_relative_to(folder):
        raise ValueError(f"{path} leads out of its folder, to {real}; copy the file, or name its folder too")
    if not real.is_file():
        raise ValueError(f"{path} is no file")


def _package(text: str) -> str | None:
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            break
        if header := _HEADER.fullmatch(line):
            return header[1]
    return None
