"""The text as tokens, its bytes: one tensor for training and one held out.

Legend of the shapes: N tokens of text, K batches, B sequences, T tokens of a sequence.
"""

import hashlib
import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

# A token is a byte.
VOCAB_SIZE: Final = 256
_END_OF_FILE: Final = b"\0"
# Debian packs `test` and `tests` separately. Without them, and without site-packages, a release of Python gives nearly
# the same text on every machine.
_SKIPPED_FOLDERS: Final = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
_START: Final = 8000


@dataclass(frozen=True)
class Text:
    """Tokens for training and held-out tokens for the validation loss, and their source.

    Args:
        source: where they are from.
        num_files: the number of files of text.
    """

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


def read_text(path: str = "", *, held_out: float = 0.1, suffixes: Sequence[str] = ()) -> Text:
    """Read a text file, or the files of a folder, and hold out the end.

    The files of a folder are ordered by a hash of their relative paths, so that the held-out end has all kinds of files
    and is the same on every machine. A zero byte ends each file, so that the model can learn where a file begins.

    Args:
        path: a text file or a folder; "" is the source of Python's standard library, without its own tests.
        held_out: the share of the bytes, above 0 and below 1.
        suffixes: of the files of a folder; by default all without a zero byte, and of Python's library its source.

    Raises:
        ValueError: no text.
        OSError: a path that does not exist or cannot be read.
    """
    root = Path(path or sysconfig.get_paths()["stdlib"]).expanduser()
    if not root.exists():
        hint = "set data.path= to a text file or a folder" if path else "this Python ships no source; set data.path="
        raise FileNotFoundError(f"cannot read the text: there is no {root}; {hint}")
    endings = tuple(suffixes) if path else tuple(suffixes) or (".py",)
    files = _files(root, endings) if root.is_dir() else [root.read_bytes()]
    text = b"".join(content + _END_OF_FILE for content in files) if root.is_dir() else files[0]
    if not text:
        raise ValueError(
            f"{root} holds no text; set data.path= to a text file or a folder of text files, or change data.suffixes="
        )
    end = len(text) - max(1, round(len(text) * held_out))
    return Text(_tensor(text[:end]), _tensor(text[end:]), source=str(root), num_files=len(files))


def training_batch(
    train_N: Tensor, *, seed: int, step: int, micro_batch: int = 0, batch_size: int, sequence_length: int
) -> tuple[Tensor, Tensor]:
    """Random sequences and, for each token, the one that follows: a pure function of (seed, step, micro_batch).

    A resumed run therefore sees the same batches as an uninterrupted one.

    Returns:
        tokens and targets, int64 of shape [batch_size, sequence_length].
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
    """
    last_start = held_out_N.numel() - sequence_length - 1
    starts = torch.linspace(0, last_start, num_batches * batch_size, dtype=torch.float64).long()
    starts_KB = starts.view(num_batches, batch_size)
    return [_sequences(held_out_N, starts_B, sequence_length=sequence_length) for starts_B in starts_KB]


def seed_generators(seed: int, *, step: int, micro_batch: int = 0, dp_rank: int = 0) -> None:
    """Seed torch's generators, on all devices, for a forward and backward.

    The random numbers of a step follow from the seed and the step, so a checkpoint holds no generator's state, and
    earlier draws, as in a validation, change nothing. All ranks of a tensor-parallel group have one `dp_rank` and draw
    the same numbers.
    """
    digest = hashlib.blake2b(f"generators/{seed}/{step}/{micro_batch}/{dp_rank}".encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "little"))


def _sequences(text_N: Tensor, starts_B: Tensor, *, sequence_length: int) -> tuple[Tensor, Tensor]:
    positions = starts_B[:, None] + torch.arange(sequence_length + 1)
    tokens_BS = text_N[positions].long()
    return tokens_BS[:, :-1].contiguous(), tokens_BS[:, 1:].contiguous()


def _files(root: Path, suffixes: tuple[str, ...]) -> list[bytes]:
    """The files of text below a folder, in the order of the hashes of their paths."""
    contents = {}
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS and not name.startswith(".")]
        for path in (Path(folder, name) for name in names):
            # Hidden files belong to tools. A file with a zero byte near its start is no text, as in Git.
            if path.is_file() and path.name.endswith(suffixes or ("",)) and not path.name.startswith("."):
                content = path.read_bytes()
                if content and (suffixes or b"\0" not in content[:_START]):
                    contents[path.relative_to(root).as_posix()] = content
    return [contents[name] for name in sorted(contents, key=lambda name: (_hash(name), name))]


def _hash(name: str) -> bytes:
    return hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()


def _tensor(content: bytes) -> Tensor:
    # A bytearray, because torch warns about read-only memory.
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
