"""The config groups and their files: the choices in each group, and how Hydra composes them.

The shipped folder is `groups`. `hydra.searchpath` adds others with the same layout:

    /my/configs/model/mine.yaml         with # @package _global_: also chooses and sets the model's components
    /my/configs/feedforward/wide.yaml   sets options of its own group
"""

# Note: [which file wins] Hydra takes the first file of a name, and searches the shipped folder first. A file that a
# shipped name or a registered component would hide raises an error. Hydra alone would ignore it silently.

import functools
import os
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import JobRuntime
from hydra.errors import HydraException
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ..components import names
from ..components.registry import of_another_kind
from ..names import no_such, shown
from .sections import COMPONENT_GROUPS, COMPONENT_SECTIONS, GROUPS, check_group
from .values import plain_copy, read_yaml

SHIPPED: Final = Path(__file__).resolve().parent / "groups"

_PACKAGE: Final = re.compile(r"^[ \t]*#[# \t]*@package[ \t]+(\S+)", flags=re.MULTILINE)
_OVERRIDE: Final = re.compile(f"override +/({'|'.join(COMPONENT_GROUPS)})")
_LOCK: Final = threading.RLock()


def choices(group: str, searchpath: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the sorted names that `group=` accepts: the files and, for a group of components, all registered ones.

    Args:
        group: one of `GROUPS`.
        searchpath: your own folders beside the shipped one, as for `hydra.searchpath`.

    Raises:
        ValueError, OSError: there is no such group; or the search path is wrong, see `open_folders`.

    >>> choices("fusion")
    ('auto', 'eager', 'inductor', 'nvfuser', 'off', 'triton')
    """
    check_group(group)
    return names_in(open_folders(searchpath), group)


def names_in(folders: Sequence[Path], group: str) -> tuple[str, ...]:
    """Return the sorted names that may be chosen in a group."""
    files = {name for folder in folders for name in _files(folder, group)}
    return tuple(sorted(files.union(names(group) if group in COMPONENT_GROUPS else ())))


def composed_files(presets: dict[str, str], folders: tuple[Path, ...]) -> dict[str, dict[str, Any]]:
    """Return every section as composed from the files, with unresolved references and without the components' defaults.

    `presets` is group -> choice. The model's file chooses in the other groups.

    Raises:
        ValueError: a group has no such choice, or Hydra cannot compose a user's file.
    """
    compose_files = _by_hydra_once if folders == (SHIPPED,) else _by_hydra
    # A copy, since the next call may return the same object.
    sections: Any = OmegaConf.to_container(compose_files("config", (*presets.items(),), folders), resolve=False)
    return dict(sections)


def component_file(group: str, choice: str, folders: tuple[Path, ...]) -> dict[str, Any]:
    """Return the section of a choice in a group of components: the registered name, or the content of its file.

    The name is None if the file has none.

    Raises:
        ValueError: as `composed_files`.
    """
    if choice in names(group):
        return {"name": choice}
    section: Any = OmegaConf.to_container(_by_hydra(None, ((group, choice),), folders), resolve=False)
    return {"name": None, **section[group]}


def _check_name(folders: Sequence[Path], group: str, name: str) -> None:
    # Names must be in the list, so that `model=../../somewhere` is not read as a path.
    known = names_in(folders, group)
    if name not in known:
        raise ValueError(no_such(group, name, known) + of_another_kind(group, name))


def _by_hydra(primary: str | None, choices: tuple[tuple[str, str], ...], folders: tuple[Path, ...]) -> DictConfig:
    """Return what Hydra composes from a primary config and group choices."""
    for group, name in choices:
        _check_name(folders, group, name)
    overrides = [f"{'' if primary else '+'}{group}={name}" for group, name in choices]
    # Note: [the caller's Hydra] Hydra's public API changes process-wide singletons. A caller may build a model inside
    # their own Hydra application, so all three are restored.
    quoted = ["'file://" + str(folder).replace("'", r"\'") + "'" for folder in folders[1:]]
    search_path = f"hydra.searchpath=[{','.join(quoted)}]"
    with _LOCK:
        instance, versions, job = GlobalHydra.instance(), VersionBase.instance(), JobRuntime.instance()
        hydra, version, name = instance.hydra, versions.version_base, job.get("name")
        instance.clear()
        try:
            with initialize_config_dir(str(SHIPPED), job_name=name, version_base="1.3"):
                sections = compose(primary, [*overrides, search_path])
        except RecursionError as error:
            raise ValueError(f"{' '.join(overrides)}: the files include each other in a circle") from error
        except (HydraException, OmegaConfBaseException) as error:
            raise ValueError(f"cannot compose {' '.join(overrides)}: {' '.join(str(error).split())}") from error
        finally:
            GlobalHydra.set_instance(instance)
            instance.hydra, versions.version_base = hydra, version
    for section in sections:
        check_group(str(section))  # a file may name another package
    return sections


# Only for the shipped files, which do not change while the program runs. Hydra takes 50 ms (2 CPU cores).
_by_hydra_once: Final = functools.cache(_by_hydra)


def open_folders(entries: Any) -> tuple[Path, ...]:
    """Return the shipped folder and the folders of a search path, with every group file in the latter checked.

    Hydra runs resolvers in a defaults list and expands anchors, so a file is checked before Hydra reads it.

    Args:
        entries: the folders of `hydra.searchpath`; relative ones are below the working directory.

    Raises:
        ValueError: `entries` is not a list of texts; a folder has no groups; or the name or the content of a file is
            refused.
        OSError: there is no such folder, or a file cannot be read.
    """
    if not isinstance(entries, (list, tuple)) or not all(isinstance(entry, str) for entry in entries):
        raise ValueError(f"hydra.searchpath must be a list of folders, such as [/my/configs], got {shown(entries)}")
    folders = (SHIPPED, *(Path(os.path.expanduser(entry)).resolve() for entry in entries))
    for folder in folders[1:]:
        if not folder.is_dir():
            raise NotADirectoryError(f"hydra.searchpath: there is no folder {folder}")
        if not any((folder / group).is_dir() for group in GROUPS):
            raise ValueError(f"hydra.searchpath: {folder} has no folder named after a group: {', '.join(GROUPS)}")
        for group in GROUPS:
            for name, path in _files(folder, group).items():
                try:
                    _check_file(name, path, group, folders)
                except ValueError as error:
                    text = str(error)
                    raise ValueError(text if text.startswith(str(path)) else f"{path}: {text}") from error
    return folders


def _files(folder: Path, group: str) -> dict[str, Path]:
    """Return name -> file for the files of a group in a folder."""
    return {path.stem: path for path in sorted((folder / group).glob("*.yaml")) if not path.name.startswith(".")}


def _check_file(name: str, path: Path, group: str, folders: Sequence[Path]) -> None:
    if name in _files(SHIPPED, group) or (group in COMPONENT_SECTIONS and name in names(group)):
        raise ValueError(
            f"{name!r} is a shipped or registered {group}, which hides this file; rename it, for example to "
            f"my_{name}.yaml"
        )
    content = plain_copy(read_yaml(path))
    if not isinstance(content, dict) or not isinstance(defaults := content.pop("defaults", []), list):
        raise ValueError("a group file must be a mapping of options, whose defaults are a list")
    for entry in defaults:
        _check_default(entry, folders, group)
    text = path.read_text(encoding="utf-8")
    package = _PACKAGE.search(text)
    # Hydra merges the files of other groups later, so they would win silently.
    is_of_model = content.keys() <= set(COMPONENT_SECTIONS) and all(isinstance(part, dict) for part in content.values())
    is_first = package is not None and not text[: package.start()].strip()
    if package and not (group == "model" and package[1] == "_global_" and is_first and is_of_model):
        raise ValueError(
            f"the package {shown(package[1])} is refused: a file sets options of its group. Only a file of model may "
            f"begin with # @package _global_, and then sets sections: {', '.join(COMPONENT_SECTIONS)}"
        )


def _check_default(entry: Any, folders: Sequence[Path], group: str) -> None:
    if entry == "_self_":
        return
    choice = entry
    if isinstance(entry, dict):
        ((key, choice),) = entry.items() if len(entry) == 1 else [("", None)]
        override = _OVERRIDE.fullmatch(key) if group == "model" else None
        group = override[1] if override else ""
    if not group or not isinstance(choice, str):
        raise ValueError(
            "an entry of defaults must be the name of a file of the same group or, in a file of model, "
            f"override /component: choice, got {shown(entry)}"
        )
    # Names must be in the list: a path would lead to a file that is not checked.
    _check_name(folders, group, choice)
