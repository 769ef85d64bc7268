"""Where a config begins: the name of a shipped model, a YAML file, a mapping, or a config that there is already."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..components import Choice
from .overrides import Layer
from .schemas import Config
from .values import plain_copy
from .yaml_text import read

__all__ = ["Source", "plain_sections", "read_source"]

Source = str | os.PathLike[str] | Mapping[str, Any] | Config


def read_source(source: Source) -> Layer:
    """Return what a source asks for. The caller's mapping is copied, not kept.

    A mapping has one entry per group: the name of a choice, or options (for a component with its registered `name`). To
    choose and to set options in the same group, the choice goes into a `defaults` list, as in Hydra:
    `{"defaults": [{"model": "llama_tiny"}], "model": {"hidden_dim": 64}}`.

    Raises:
        TypeError: it is none of the four.
        OSError: the file cannot be read.
        ValueError: the file or mapping holds what a config cannot.
    """
    if isinstance(source, Config):
        return _layer(plain_sections(source))
    if isinstance(source, Mapping):
        return _layer(source)
    if isinstance(source, os.PathLike):
        return _layer(read(Path(source)))
    if isinstance(source, str):
        if source.endswith((".yaml", ".yml")) or "/" in source or os.sep in source:
            return _layer(read(Path(os.path.expanduser(source))))
        return Layer(choices={"model": source})
    raise TypeError(
        f"a config is the name of a shipped model, the path of a .yaml file or a mapping, got a {type(source).__name__}"
    )


def plain_sections(config: Config) -> dict[str, Any]:
    """Return a config as plain dicts, section by section: the mapping that gives an equal config again."""
    return {
        name: plain_copy(section if isinstance(section, Choice) else vars(section), name)
        for name, section in vars(config).items()
    }


def _layer(content: Any) -> Layer:
    if not isinstance(content, Mapping):
        raise ValueError(f"a config must be a mapping of groups, got {content!r}")
    content = plain_copy(content)
    layer = Layer()
    for entry in _defaults(content.pop("defaults", [])):
        for group, choice in entry.items():
            # `override /feedforward` is how Hydra's own files say it.
            layer.add([re.sub(r"^(override +)?/?", "", group)], choice)
    for group, section in content.items():
        layer.add([group], section)
    return layer


def _defaults(entries: Any) -> list[dict[str, str]]:
    if not isinstance(entries, list):
        raise ValueError(f"defaults must be a list of group: choice, got {entries!r}")
    chosen = [entry for entry in entries if entry != "_self_"]
    for entry in chosen:
        if not isinstance(entry, dict) or not all(isinstance(choice, str) for choice in entry.values()):
            raise ValueError(f"an entry of defaults must be group: choice, got {entry!r}")
    return chosen
