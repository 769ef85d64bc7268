"""Atomic writes, for every command: write a second file, flush it to the disk, rename it."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Let `write` fill a second file, then rename it to `path`.

    A kill, a full disk or an exception leaves the old file at `path` unchanged.

    Args:
        path: the file to replace or create; its folder must exist.
        write: takes the open binary file.

    Raises:
        OSError: the file could not be written; the text names it and the reason.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> write_whole(folder / "a.txt", lambda file: file.write(b"whole"))
    >>> (folder / "a.txt").read_bytes()
    b'whole'
    """
    # One fixed name: the next write overwrites the file of a killed process.
    beside = path.with_name(path.name + ".part")
    try:
        with open(beside, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
        _flush_folder(path.parent)
    except BaseException as error:
        _remove(beside)
        cause = _disk_error(error)
        if cause is None:
            raise
        raise OSError(f"cannot write {path}: {cause.strerror or cause}") from error


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8, as `write_whole` does."""
    write_whole(path, lambda file: file.write(text.encode()))


def _disk_error(error: BaseException) -> OSError | None:
    """torch.save turns an OSError of the file under it into a RuntimeError; the OSError stays in its context."""
    cause: BaseException | None = error
    while isinstance(cause, RuntimeError):
        cause = cause.__context__
    return cause if isinstance(cause, OSError) else None


def _remove(path: Path) -> None:
    # A full disk may also stop the removal; report the first error.
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return


def _flush_folder(folder: Path) -> None:
    """Make the rename itself survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
