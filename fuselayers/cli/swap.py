"""`fuselayers swap`: what `fuselayers.swap` finds in a model, and whether it gives the same numbers."""

import argparse
import importlib
from pathlib import Path

from rich.console import Console
from torch import nn

from ..components.swap import swap
from ..names import shown
from .text import say

DESCRIPTION = """\
Puts fused layers into a model of transformers, compares each with its original, and prints what was found. The model
is a folder with config.json. Without weights in the folder they are random.

  fuselayers swap path/to/folder
  fuselayers swap path/to/folder --where "model.layers.0.*" """.rstrip()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model and the options of `swap`."""
    parser.add_argument("folder", metavar="FOLDER", help="a folder with config.json, as save_pretrained writes it")
    parser.add_argument("--where", default="*", help="qualified names of modules: layers.1[0-9].* (default all)")
    parser.add_argument("--level", default="auto", choices=("auto", "layers", "blocks"), help="default auto")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Swap and print the report.

    Raises:
        ValueError: the folder holds no model of transformers, or `transformers` is not installed.
    """
    model = _of_transformers(Path(arguments.folder))
    report = swap(model, arguments.where, level=arguments.level)
    say(console, str(report))
    return 0


def _of_transformers(folder: Path) -> nn.Module:
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(
            f"{shown(str(folder))} has no config.json; name a folder that save_pretrained wrote. For a model of the "
            "configs, choose layers by overrides: feedforward=fused_mlp"
        )
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise ValueError("a folder needs the package transformers: pip install transformers") from error
    config = transformers.AutoConfig.from_pretrained(folder)
    name = (config.architectures or [""])[0]
    kind = getattr(transformers, name, None)
    if kind is None:
        raise ValueError(f"{file}: transformers {transformers.__version__} has no class {name!r} (architectures)")
    has_weights = any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))
    model: nn.Module = kind.from_pretrained(folder) if has_weights else kind(config)
    return model
