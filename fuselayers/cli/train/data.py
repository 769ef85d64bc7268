"""The text as tokens, its bytes: one tensor for training and one held out.

Legend of the shapes: N tokens of text, K batches, B sequences, T tokens of a sequence.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch
from torch import Tensor

from ..documents import Document, find_documents, open_text

# A token is a byte.
VOCAB_SIZE: Final = 256
_END_OF_FILE = b"\0"


@dataclass(frozen=True)
class Text:
    """Tokens for training and held-out tokens for the validation loss, and their source.

    Args:
        train_N: uint8.
        held_out_N: uint8.
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
    """Read a text file, or the files of a folder, and hold out a share; see `find_documents`.

    A zero byte ends every file of a folder, so that the model can learn where a file begins.

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
    found = find_documents(path, held_out=held_out, suffixes=suffixes)
    end = _END_OF_FILE if found.num_files > 1 else b""
    train, held = (
        b"".join(_read(document) + end for document in found.parts if document.held_out is wanted)
        for wanted in (False, True)
    )
    return Text(train_N=_tensor(train), held_out_N=_tensor(held), source=str(found.source), num_files=found.num_files)


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
    starts_B = _starts(
        train_N.numel() - sequence_length, seed=seed, step=step, micro_batch=micro_batch, batch_size=batch_size
    )
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


def _starts(num_starts: int, *, seed: int, step: int, micro_batch: int, batch_size: int) -> Tensor:
    # Consecutive seeds of a Mersenne twister are correlated, and it takes 32 bits: hash the three numbers together.
    digest = hashlib.blake2b(f"{seed}/{step}/{micro_batch}".encode(), digest_size=4).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    return torch.randint(0, num_starts, (batch_size,), generator=generator)


def _sequences(text_N: Tensor, starts_B: Tensor, *, sequence_length: int) -> tuple[Tensor, Tensor]:
    positions = starts_B[:, None] + torch.arange(sequence_length + 1)
    tokens_BS = text_N[positions].long()
    return tokens_BS[:, :-1].contiguous(), tokens_BS[:, 1:].contiguous()


def _read(document: Document) -> bytes:
    with open_text(document.path) as file:
        file.seek(document.start)
        return file.read(-1 if document.stop is None else document.stop - document.start)


def _tensor(content: bytes) -> Tensor:
    # A bytearray, because torch warns about read-only memory.
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
