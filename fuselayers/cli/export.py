"""`fuselayers export`: the model of a run or of one checkpoint as config.yaml and model.safetensors."""

import argparse
import shutil
from pathlib import Path

from rich.console import Console
from safetensors import SafetensorError
from safetensors.torch import save_file

from ..configs.from_pretrained import CONFIG
from .files import write_text
from .text import say
from .train.checkpoint import config_of, find_checkpoint, whole_tensors
from .train.state import MODEL

DESCRIPTION = """\
Writes the model of a run's newest checkpoint, or of one checkpoint, as a folder with config.yaml and model.safetensors,
in the dtypes of the checkpoint. One process is enough, whatever the number of processes that trained it.

  fuselayers export runs/<date> --out my_model
  fuselayers export runs/<date>/checkpoints/step-000200 --out my_model

`fuselayers.from_pretrained("my_model")` loads it, the same numbers bit for bit; so does `safetensors`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run and the folder to write."""
    parser.add_argument("checkpoint", metavar="RUN | CHECKPOINT", help="the folder of a run, or one of its checkpoints")
    parser.add_argument("--out", metavar="FOLDER", required=True, help="the folder to write; it must not exist yet")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Export as the command line says; see `export`."""
    folder = Path(arguments.out).expanduser()
    path, count = export(arguments.checkpoint, folder)
    say(console, f"the model of {path}, {count:,} numbers, is in {folder}")
    return 0


def export(checkpoint: str, folder: Path) -> tuple[Path, int]:
    """Write the model of a checkpoint into a new folder; after an error the folder is removed.

    Returns:
        The checkpoint, and how many numbers the model has.

    Raises:
        FileNotFoundError, ValueError: there is no such checkpoint, or it is damaged.
        FileExistsError: the folder exists.
        OSError: it could not be written.
        ValueError: the config of the checkpoint does not compose.
    """
    if folder.exists():
        raise FileExistsError(f"{folder} already exists; choose another --out")
    path, content = find_checkpoint(checkpoint)
    config_of(path, content)
    tensors = whole_tensors(path, prefix=MODEL)
    folder.mkdir(parents=True)
    try:
        write_text(folder / CONFIG, content.config_yaml)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt", "step": str(content.step)})
        # safetensors makes its file readable for the owner only.
        shutil.copymode(folder / CONFIG, folder / "model.safetensors")
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if not isinstance(error, (OSError, SafetensorError)):
            raise
        raise OSError(f"cannot write {folder}: {error}") from error
    return path, sum(tensor.numel() for tensor in tensors.values())
