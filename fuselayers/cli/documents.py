"""Which files of a path are text, and which part of them is held out."""

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from ..regular_files import open_regular

# Debian packs `test` and `tests` separately. Without them, and without site-packages, a release of Python gives nearly
# the same text on every machine.
_SKIPPED_FOLDERS: Final = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
_START: Final = 8000


@dataclass(frozen=True)
class Document:
    """A file of text, or one of the two parts of a single file.

    Args:
        path: the file.
        start: its first byte.
        stop: the byte after its last one; None for the file's end.
        held_out: whether it is for the validation loss.
    """

    path: Path
    start: int
    stop: int | None
    held_out: bool


@dataclass(frozen=True)
class Documents:
    """The documents of a path: those to learn from, then those held out.

    Args:
        source: the file or the folder.
        parts: the documents; of a single file its two parts.
        num_files: the number of files.
    """

    source: Path
    parts: tuple[Document, ...]
    num_files: int


def standard_library() -> Path:
    """The folder of the running Python's standard library.

    >>> (standard_library() / "os.py").is_file()
    True
    """
    return Path(sysconfig.get_paths()["stdlib"])


def find_documents(path: str = "", *, held_out: float, suffixes: Sequence[str] = ()) -> Documents:
    """Find the text of a file or a folder, and hold out a share.

    Whole files are held out, by a hash of their path relative to the folder, so the choice is the same in every run and
    on every machine, and other files do not change it. If there is one file, its end is held out.

    Args:
        path: a text file or a folder; "" is the source of Python's standard library, without its own tests.
        held_out: the share of files (of bytes, for a single file), above 0 and below 1.
        suffixes: of the files of a folder; none takes all without a zero byte, and of Python's library its source.

    Raises:
        ValueError: no text.
        OSError: a path that does not exist or cannot be read.

    >>> len(find_documents(held_out=0.1).parts) > 100
    True
    """
    if not 0 < held_out < 1:
        raise ValueError(f"data.held_out must be above 0 and below 1, got {held_out}")
    root = Path(path).expanduser() if path else standard_library()
    if not root.exists():
        hint = "set data.path= to a text file or a folder" if path else "this Python ships no source; set data.path="
        raise FileNotFoundError(f"cannot read the text: there is no {root}; {hint}")
    if not root.is_dir():
        return _parts_of_file(root, root, held_out=held_out)
    suffixes = tuple(suffixes) if path else tuple(suffixes) or (".py",)
    names = [name for name in _files(root, suffixes=suffixes) if _holds_text(root / name, any_bytes=bool(suffixes))]
    if not names:
        wanted = f"ends in {' or '.join(suffixes)}" if suffixes else "is text, without a zero byte"
        raise ValueError(f"no text in {root}: no file that is not empty {wanted}; set data.path= or data.suffixes=")
    if len(names) == 1:
        return _parts_of_file(root / names[0], root / names[0], held_out=held_out)
    held = _held_out_names(names, held_out=held_out)
    return Documents(
        source=root,
        parts=tuple(
            Document(root / name, 0, None, held_out=name in held) for name in sorted(names, key=held.__contains__)
        ),
        num_files=len(names),
    )


def _parts_of_file(path: Path, source: Path, *, held_out: float) -> Documents:
    with open_text(path) as file:
        size = file.seek(0, os.SEEK_END)
    if not size:
        raise ValueError(f"no text in {path}: the file is empty; set data.path= to a text file or a folder")
    end = size - max(1, round(size * held_out))
    parts = (Document(path, 0, end, held_out=False), Document(path, end, size, held_out=True))
    return Documents(source=source, parts=parts, num_files=1)


@contextmanager
def open_text(path: Path) -> Iterator[BinaryIO]:
    """Open a file of text; an error of reading it names it, and what to do."""
    try:
        with open_regular(path) as file:
            yield file
    except ValueError as error:
        raise ValueError(f"cannot read the text: {error}; set data.path= to a text file or a folder") from error
    except OSError as error:
        raise OSError(f"cannot read the text {path}: {error.strerror}; set data.path= to something readable") from error


def _files(root: Path, *, suffixes: tuple[str, ...]) -> list[str]:
    """Sorted names relative to the root, with forward slashes."""
    found = []
    for folder, subfolders, names in os.walk(root, onerror=_raise):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS and not name.startswith(".")]
        paths = [Path(folder) / name for name in names if _is_text(name, suffixes)]
        # A pipe or a broken link is left out only where it was not asked for by its suffix.
        found += [path.relative_to(root).as_posix() for path in paths if suffixes or path.is_file()]
    return sorted(found)


def _is_text(name: str, suffixes: tuple[str, ...]) -> bool:
    # Hidden files belong to tools: an editor's lock is a broken link with the file's suffix.
    return (not suffixes or name.endswith(suffixes)) and not name.startswith(".")


def _holds_text(path: Path, *, any_bytes: bool) -> bool:
    with open_text(path) as file:
        start = file.read(_START)
    # A file with a zero byte at its start is no text, as for Git.
    return bool(start) and (any_bytes or b"\0" not in start)


def _raise(error: OSError) -> None:
    raise OSError(f"cannot read the folder {error.filename}: {error.strerror}; set data.path= to something readable")


def _held_out_names(names: Sequence[str], *, held_out: float) -> set[str]:
    """The names whose hash is below the share; at least one, and never all."""
    ranked = sorted(names, key=_hash)
    held = [name for name in ranked if _hash(name) < held_out]
    return set((held or ranked[:1])[: len(ranked) - 1])


def _hash(name: str) -> float:
    """A number in [0, 1)."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48
