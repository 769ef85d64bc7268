"""Atomic writes, for every command: write a second file, flush it to the disk, rename it."""

import os
import re
import shutil
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final

_LEFT_OVER: Final = re.compile(r".+\.[0-9a-f]{32}\.part")


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Let `write` fill a second file, then rename it to `path`.

    A kill, a full disk or an exception leaves the old file unchanged.

    Args:
        path: the file to replace or create; its folder must exist.
        write: takes the open binary file.

    Raises:
        OSError: the file could not be written; the text names it and the reason.
    """
    beside = temporary_name(path)
    try:
        with open(beside, "xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
        flush_folder(path.parent)
    except BaseException as error:
        with suppress(OSError):  # a full disk may also stop the removal; the first error is reported
            beside.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        raise OSError(f"cannot write {path}: {error.strerror or error}") from error


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8, as `write_whole` does."""
    write_whole(path, lambda file: file.write(text.encode()))


def temporary_name(path: Path) -> Path:
    """Return a unique name in the same folder, to write under first: two writers of `path` do not mix their bytes."""
    return path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")


def clear_left_overs(folder: Path) -> None:
    """Remove the temporary files and folders that killed writers left.

    Call it only where no other process writes into the folder.
    """
    for path in folder.glob("*.part"):
        if not _LEFT_OVER.fullmatch(path.name):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()


def flush_folder(folder: Path) -> None:
    """Make the renames in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
