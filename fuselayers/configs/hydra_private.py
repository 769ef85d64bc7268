"""Hydra's composition of group files, without Hydra's application around it.

Checked with hydra-core 1.3.0, 1.3.2 and 1.3.8; setup.py admits 1.3 only.
"""

# Note: [no GlobalHydra]
# Hydra's public compose() needs its process-wide singleton, which holds one application at a time. Whoever builds a
# model inside their own Hydra application (or thread) must find that one as they left it, so the two steps that we
# need, the defaults list and the merge of what it names, are taken from below it. Its ConfigStore is left out for the
# same reason: an application's own node called "config" would be merged into ours.

from pathlib import Path
from typing import Any

from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from omegaconf import DictConfig, OmegaConf

__all__ = ["compose_files"]


def compose_files(folder: Path, primary: str, choices: dict[str, str]) -> dict[str, Any]:
    """Return what a primary file and the group files of its defaults list make together, as plain dicts.

    Args:
        folder: where the files are.
        primary: the file to begin with, relative to the folder, without ".yaml".
        choices: group -> file of that group, in place of the defaults list's own choice.

    The files are trusted: nothing is checked here, and `${...}` is left as it stands.

    >>> folder = Path(__file__).parent / "groups"
    >>> compose_files(folder, "feedforward/gated_mlp", {})
    {'feedforward': {'name': 'gated_mlp'}}
    """
    Plugins.instance()  # registers the source that reads files
    search_path = ConfigSearchPathImpl()
    search_path.append("fuselayers", f"file://{folder}")
    repository = CachingConfigRepository(ConfigRepository(config_search_path=search_path))
    defaults = create_defaults_list(
        repo=repository,
        config_name=primary,
        overrides_list=OverridesParser.create().parse_overrides([f"{key}={value}" for key, value in choices.items()]),
        prepend_hydra=False,
        skip_missing=False,
    ).defaults
    merged = OmegaConf.create()
    for default in defaults:
        assert default.config_path is not None
        loaded = repository.load_config(default.config_path)
        assert loaded is not None
        assert isinstance(loaded.config, DictConfig)
        content = OmegaConf.to_container(loaded.config, resolve=False)
        assert isinstance(content, dict)
        content.pop("defaults", None)
        if default.package:
            content = {default.package: content}
        merged.merge_with(content)
    plain = OmegaConf.to_container(merged, resolve=False)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}
