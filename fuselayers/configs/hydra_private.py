"""Hydra's composition of group files, without Hydra's application around it.

Checked with hydra-core 1.3.0, 1.3.2 and 1.3.8; setup.py admits 1.3 only.
"""

# Note: [no GlobalHydra]
# Hydra's public compose() needs its process-wide singleton, which holds one application at a time. Whoever builds a
# model inside their own Hydra application (or thread) must find that one as they left it, so the two steps that we
# need, the defaults list and the merge of what it names, are taken from below it. Its ConfigStore is left out for the
# same reason: an application's own node called "config" would be merged into ours. And its reader of files is left out
# because it admits more than a config may hold: we bring our own.

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import OmegaConf

from .folders import GROUPS, GroupFile, load
from .yaml_text import scalar

__all__ = ["compose_files", "value_of"]


def compose_files(folders: Sequence[Path], primary: str, choices: dict[str, str]) -> dict[str, Any]:
    """Return what a primary file and the group files of its defaults list make together, as plain dicts.

    Args:
        folders: where the files are, see `open_folders`.
        primary: the file to begin with: `PRIMARY`, or "group/name".
        choices: group -> name in that group, in place of the defaults list's own choice.

    What the files hold is not checked here beyond what `load` does, and `${...}` is left as it stands. What one file
    sets for a part stays where another file chooses another component for it; that a swap keeps only what was set away
    from the old defaults, see `changed`, is the rule for sources and overrides.

    Raises:
        OSError, ValueError: as `load`; or the files build on each other in a circle, or choose twice.

    >>> from .folders import SHIPPED
    >>> compose_files([SHIPPED], "feedforward/gated_mlp", {})
    {'feedforward': {'name': 'gated_mlp'}}
    """
    source = _Folders(folders)
    plain_repository = ConfigRepository(config_search_path=ConfigSearchPathImpl())
    plain_repository.sources = [source]
    repository = CachingConfigRepository(plain_repository)
    try:
        defaults = create_defaults_list(
            repo=repository,
            config_name=primary,
            overrides_list=OverridesParser.create().parse_overrides(
                [f"{key}={value}" for key, value in choices.items()]
            ),
            prepend_hydra=False,
            skip_missing=False,
        ).defaults
    except RecursionError as error:
        raise ValueError(f"{primary} builds on itself, through the defaults of its files") from error
    except HydraException as error:
        raise ValueError(f"cannot compose {primary} with its defaults: {' '.join(str(error).split())}") from error
    merged: dict[str, Any] = {}
    for default in defaults:
        assert default.config_path is not None
        content = source.file(default.config_path).content
        _merge(merged, {default.package: content} if default.package else content)
    return merged


def value_of(override: Override) -> Any:
    """Return the value of an override, with numbers as a file has them: 007 is 7, and '007' in quotes is text."""
    return _plain(override._value)


def _merge(into: dict[str, Any], content: dict[str, Any]) -> None:
    for key, value in content.items():
        if isinstance(value, dict):
            below = into.get(key)
            into[key] = below if isinstance(below, dict) else {}
            _merge(into[key], value)
        else:
            into[key] = copy.deepcopy(value)  # a shipped file is read once


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {_plain(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    if isinstance(value, QuotedString):
        return value.text
    return scalar(value) if isinstance(value, str) else value


def _with_self(defaults: list[Any]) -> list[Any]:
    """A file's own options win over the files that it builds on, unless it says otherwise: Hydra warns unless told."""
    if "_self_" in defaults:
        return defaults
    overrides = [entry for entry in defaults if isinstance(entry, dict) and next(iter(entry)).startswith("override ")]
    return [*(entry for entry in defaults if entry not in overrides), "_self_", *overrides]


class _Folders(ConfigSource):
    """All folders as one source of Hydra's; `load` knows what is in them."""

    def __init__(self, folders: Sequence[Path]) -> None:
        super().__init__(provider="fuselayers", path=f"{self.scheme()}://")
        self.folders = folders
        self.files: dict[str, GroupFile] = {}

    def file(self, config_path: str) -> GroupFile:
        """Read a file once."""
        if config_path not in self.files:
            group, _, name = config_path.removesuffix(".yaml").rpartition("/")
            self.files[config_path] = load(self.folders, group, name)
        return self.files[config_path]

    @staticmethod
    def scheme() -> str:
        return "file"

    def load_config(self, config_path: str) -> ConfigResult:
        file = self.file(config_path)
        return ConfigResult(
            provider=self.provider,
            path=str(file.path),
            # Hydra orders the files, which takes their defaults only; what they hold is merged as plain values.
            config=OmegaConf.create({"defaults": _with_self(file.defaults)}),
            header={"package": "_global_" if file.is_global else None},
        )

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return config_path in GROUPS

    def is_config(self, config_path: str) -> bool:
        # What there is not, `load` says better than Hydra.
        return True

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return []
