"""Atomic writes, for every command: write a second file, flush it to the disk, rename it."""

import os
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Final

_LEFT_OVER: Final = re.compile(r".+\.[0-9a-f]{32}\.part")


def write_whole(path: Path, write: Callable[[BinaryIO], object], *, keep: Path | None = None) -> None:
    """Let `write` fill a second file, then rename it to `path`.

    A kill, a full disk or an exception leaves the old file unchanged, at `path` or at `keep`.

    Args:
        path: the file to replace or create; its folder must exist.
        write: takes the open binary file.
        keep: the old file's new name in the same folder; a file of that name is replaced.

    Raises:
        OSError: the file could not be written; the text names it and the reason.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> write_whole(folder / "a.txt", lambda file: file.write(b"whole"))
    >>> (folder / "a.txt").read_bytes()
    b'whole'
    """
    # A name of its own: two processes that write one file do not mix their bytes.
    beside = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
    try:
        with open(beside, "xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        if keep is not None and path.exists():
            _keep_as(path, keep)
        os.replace(beside, path)
        flush_folder(path.parent)
    except BaseException as error:
        _remove(beside)
        cause = _disk_error(error)
        if cause is None:
            raise
        raise OSError(f"cannot write {path}: {cause.strerror or cause}") from error


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8, as `write_whole` does."""
    write_whole(path, lambda file: file.write(text.encode()))


def clear_left_overs(folder: Path) -> None:
    """Remove the second files of killed writers; call it only where no other process writes into the folder."""
    for path in folder.glob("*.part"):
        if _LEFT_OVER.fullmatch(path.name):
            _remove(path)


def _keep_as(path: Path, keep: Path) -> None:
    """Give the file the second name `keep`, by a link, so that `path` is there at every moment for other processes."""
    link = keep.with_name(f"{keep.name}.{uuid.uuid4().hex}.part")
    try:
        os.link(path, link)
    except OSError:  # a file system without links
        os.replace(path, keep)
    else:
        os.replace(link, keep)


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


def flush_folder(folder: Path) -> None:
    """Make the renames in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
