"""Files that are either whole or not there: write beside, flush to the disk, rename. Every command writes so."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

__all__ = ["write_whole"]


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Let `write` fill a file beside `path`, then put it in its place.

    A kill, a full disk or an exception at any moment leaves what was at `path` before as it was.

    Args:
        path: the file to replace or create; its folder must exist.
        write: is given the open binary file.

    Raises:
        OSError: the file could not be written; the text names it and the reason.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> write_whole(folder / "a.txt", lambda file: file.write(b"whole"))
    >>> (folder / "a.txt").read_bytes()
    b'whole'
    """
    # One fixed name: what a killed process left behind is overwritten by the next write.
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


def _disk_error(error: BaseException) -> OSError | None:
    """torch.save turns an OSError of the file under it into a RuntimeError; the OSError stays in its context."""
    cause: BaseException | None = error
    while isinstance(cause, RuntimeError):
        cause = cause.__context__
    return cause if isinstance(cause, OSError) else None


def _remove(path: Path) -> None:
    # What stopped the write may also stop the removal, and the first error is the one to report.
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
