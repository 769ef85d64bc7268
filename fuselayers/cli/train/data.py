"""The text as bytes: one uint8 tensor for training and one held out.

Legend of the shapes: N bytes of text, K batches, B sequences, T tokens (a token is a byte).
"""

import hashlib
import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from ...regular_files import open_regular

# Debian packs `test` and `tests` separately. Without them, and without site-packages, a release of Python gives nearly
# the same text on every machine.
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
_END_OF_FILE = b"\0"


@dataclass(frozen=True)
class Text:
    """Bytes for training and held-out bytes for the validation loss, uint8 [N], and their source."""

    train_N: Tensor
    held_out_N: Tensor
    source: str
    num_files: int

    @cached_property
    def fingerprint(self) -> str:
        """The SHA-256 of both tensors: a resumed run compares it with its checkpoint's."""
        digest = hashlib.sha256(self.train_N.numpy().data)
        digest.update(self.held_out_N.numpy().data)
        return digest.hexdigest()


def standard_library() -> Path:
    """The folder of the running Python's standard library.

    >>> (standard_library() / "os.py").is_file()
    True
    """
    return Path(sysconfig.get_paths()["stdlib"])


def read_text(path: str = "", *, held_out: float = 0.1, suffixes: Sequence[str] = ()) -> Text:
    """Read a text file, or the files of a folder, and hold out a share.

    Whole files are held out, by a hash of their path relative to the folder, so the choice is the same in every run and
    on every machine, and other files do not change it. Of a single file the end is held out. A zero byte ends every
    file of a folder, so that the model can learn where a file begins.

    Args:
        path: a text file or a folder; "" is the source of Python's standard library, without its own tests.
        held_out: the share of files (of bytes, for a single file), above 0 and below 1.
        suffixes: of the files of a folder; none takes all without a zero byte, and of Python's library its source.

    Raises:
        ValueError: no text.
        OSError: a path that does not exist or cannot be read.

    >>> read_text().train_N.dtype
    torch.uint8
    """
    if not 0 < held_out < 1:
        raise ValueError(f"data.held_out must be above 0 and below 1, got {held_out}")
    root = Path(path).expanduser() if path else standard_library()
    if not root.exists():
        hint = "set data.path= to a text file or a folder" if path else "this Python ships no source; set data.path="
        raise FileNotFoundError(f"cannot read the text: there is no {root}; {hint}")
    if not root.is_dir():
        return _split_file(root, held_out=held_out)
    suffixes = tuple(suffixes) if path else tuple(suffixes) or (".py",)
    names = _files(root, suffixes=suffixes)
    texts = [(name, text) for name in names if (text := _read(root / name, only_text=not suffixes))]
    if not texts:
        wanted = f"ends in {' or '.join(suffixes)}" if suffixes else "is text, without a zero byte"
        raise ValueError(f"no text in {root}: no file that is not empty {wanted}; set data.path= or data.suffixes=")
    if len(texts) == 1:
        return _split_file(root / texts[0][0], held_out=held_out)
    held = _held_out_names([name for name, _ in texts], held_out=held_out)
    return Text(
        train_N=_tensor(b"".join(text + _END_OF_FILE for name, text in texts if name not in held)),
        held_out_N=_tensor(b"".join(text + _END_OF_FILE for name, text in texts if name in held)),
        source=str(root),
        num_files=len(texts),
    )


def training_batch(
    train_N: Tensor, *, seed: int, step: int, micro_batch: int = 0, batch_size: int, sequence_length: int
) -> tuple[Tensor, Tensor]:
    """Random sequences and, for each token, the one that follows: a pure function of (seed, step, micro_batch).

    A resumed run therefore sees the same batches as an uninterrupted one.

    Returns:
        tokens and targets, int64 of shape [batch_size, sequence_length].

    >>> train_N = torch.arange(100, dtype=torch.uint8)
    >>> tokens_BT, targets_BT = training_batch(train_N, seed=0, step=1, batch_size=2, sequence_length=8)
    >>> bool((targets_BT == tokens_BT + 1).all())
    True
    """
    # Consecutive seeds of a Mersenne twister are correlated, and it takes 32 bits: hash the three numbers together.
    digest = hashlib.blake2b(f"{seed}/{step}/{micro_batch}".encode(), digest_size=4).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    starts_B = torch.randint(0, train_N.numel() - sequence_length, (batch_size,), generator=generator)
    return _sequences(train_N, starts_B, sequence_length=sequence_length)


def evaluation_batches(
    held_out_N: Tensor, *, num_batches: int, batch_size: int, sequence_length: int
) -> list[tuple[Tensor, Tensor]]:
    """Sequences at even distances over the whole held-out text, the same at every evaluation.

    Every batch has the same shape, so a model is compiled once. In a short text the sequences overlap.

    >>> held_out_N = torch.zeros(1000, dtype=torch.uint8)
    >>> batches = evaluation_batches(held_out_N, num_batches=3, batch_size=2, sequence_length=8)
    >>> len(batches), batches[0][0].shape
    (3, torch.Size([2, 8]))
    """
    last_start = held_out_N.numel() - sequence_length - 1
    starts = torch.linspace(0, last_start, num_batches * batch_size, dtype=torch.float64).long()
    starts_KB = starts.view(num_batches, batch_size)
    return [_sequences(held_out_N, starts_B, sequence_length=sequence_length) for starts_B in starts_KB]


def check_length(text: Text, *, sequence_length: int) -> None:
    """Raise ValueError if the training or the held-out text is not longer than a sequence."""
    for part, text_N in (("training", text.train_N), ("held-out", text.held_out_N)):
        if text_N.numel() <= sequence_length:
            raise ValueError(
                f"the {part} text must be longer than a sequence of {sequence_length} bytes, got {text_N.numel()} "
                f"bytes from {text.source}; give more text (data.path=) or a smaller data.sequence_length="
            )


def _sequences(text_N: Tensor, starts_B: Tensor, *, sequence_length: int) -> tuple[Tensor, Tensor]:
    positions = starts_B[:, None] + torch.arange(sequence_length + 1)
    bytes_BS = text_N[positions].long()
    return bytes_BS[:, :-1].contiguous(), bytes_BS[:, 1:].contiguous()


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


def _raise(error: OSError) -> None:
    raise OSError(f"cannot read the folder {error.filename}: {error.strerror}; set data.path= to something readable")


def _read(path: Path, *, only_text: bool = False) -> bytes:
    try:
        with open_regular(path) as file:
            start = file.read(8000)
            # A file with a zero byte at its start is no text, as for Git.
            return b"" if only_text and _END_OF_FILE in start else start + file.read()
    except ValueError as error:
        raise ValueError(f"cannot read the text: {error}; set data.path= to a text file or a folder") from error
    except OSError as error:
        raise OSError(f"cannot read the text {path}: {error.strerror}; set data.path= to something readable") from error


def _split_file(path: Path, *, held_out: float) -> Text:
    content = _read(path)
    if not content:
        raise ValueError(f"no text in {path}: the file is empty; set data.path= to a text file or a folder")
    num_train = len(content) - max(1, round(len(content) * held_out))
    return Text(
        train_N=_tensor(content[:num_train]), held_out_N=_tensor(content[num_train:]), source=str(path), num_files=1
    )


def _held_out_names(names: Sequence[str], *, held_out: float) -> set[str]:
    """The names whose hash is below the share; at least one, and never all."""
    ranked = sorted(names, key=_hash)
    held = [name for name in ranked if _hash(name) < held_out]
    return set((held or ranked[:1])[: len(ranked) - 1])


def _hash(name: str) -> float:
    """A number in [0, 1)."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48


def _tensor(content: bytes) -> Tensor:
    # A bytearray, because torch warns about read-only memory.
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
