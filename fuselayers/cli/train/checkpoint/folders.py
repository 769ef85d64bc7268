"""The checkpoints of a run: folders `step-000200`, each written under another name and then renamed."""

import os
import re
import shutil
from pathlib import Path
from typing import Final

from ...files import flush_folder, temporary_name

FOLDER_NAME: Final = "checkpoints"
_STEP: Final = re.compile(r"step-(\d{6,18})")


def checkpoints_of(run: Path) -> Path:
    """The folder of a run's checkpoints."""
    return run / FOLDER_NAME


def run_of(checkpoint: Path) -> Path | None:
    """The folder of the run whose checkpoint this is, or None for one that was copied elsewhere."""
    # As it was written, so that messages name it so; else as it is, for `step-000200` and `../step-000200`.
    for path in (checkpoint, Path(os.path.abspath(checkpoint))):
        if path.parent.name == FOLDER_NAME:
            return path.parent.parent
    return None


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is.

    >>> path_of(Path("checkpoints"), 200).name
    'step-000200'
    """
    return folder / f"step-{step:06}"


def listed(folder: Path) -> list[tuple[int, Path]]:
    """The steps and paths of all checkpoints in a folder, the oldest first. Each was whole when it was renamed."""
    if not folder.is_dir():
        return []
    matches = [(_STEP.fullmatch(path.name), path) for path in folder.iterdir()]
    return sorted((int(match[1]), path) for match, path in matches if match is not None)


def newest(folder: Path) -> Path | None:
    """The newest checkpoint in a folder, or None.

    >>> newest(Path("nowhere")) is None
    True
    """
    found = listed(folder)
    return found[-1][1] if found else None


def find_checkpoint(resume: str) -> Path:
    """The checkpoint that `train.resume=` means: itself, or the newest one of a run, or of a folder of checkpoints."""
    path = Path(resume).expanduser()
    return newest(checkpoints_of(path)) or newest(path) or path


def commit(written: Path, path: Path, *, step: int, keep: int) -> None:
    """Make a checkpoint that is written and flushed the newest one, in a rename, and remove old ones.

    Checkpoints of this step and later ones are of a run that went back and takes another course: they go first, so that
    a kill never leaves one of them as the newest.

    Raises:
        OSError: it could not be renamed.
    """
    folder = path.parent
    flush_folder(written)
    gone = [_renamed(other) for number, other in listed(folder) if number >= step]
    os.rename(written, path)
    gone += [_renamed(old) for _, old in listed(folder)[:-keep]]
    flush_folder(folder)
    # The first checkpoint made the folder.
    flush_folder(folder.parent)
    for other in gone:
        # A folder that cannot be removed harms nobody: its name is no checkpoint's, and the next `Saver` tries again.
        shutil.rmtree(other, ignore_errors=True)


def _renamed(path: Path) -> Path:
    """Give a checkpoint a temporary name: half removed, it must not be taken for a whole one."""
    other = temporary_name(path)
    os.rename(path, other)
    return other
