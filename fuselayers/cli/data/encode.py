"""Text to tokens, in this process or in several."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..token_folder import as_stored
from ..vocabulary import load_tokenizer

# Pieces that wait for a worker, for each worker: enough that none idles, few enough that memory stays constant.
_WAITING: Final = 3


@dataclass(frozen=True)
class Piece:
    """A part of a document.

    Args:
        text: whole lines, as bytes.
        ends: whether the document ends after it.
    """

    text: bytes
    ends: bool


@dataclass(frozen=True)
class Part:
    """Pieces that are encoded together, a worker's task: one long one, or many short ones."""

    pieces: list[Piece]
    held_out: bool


@dataclass(frozen=True)
class Encoder:
    """Turns pieces into tokens as they are stored.

    Args:
        dtype: of the file of tokens.
        end_token: it ends a document; None to put nothing there.
        tokenizer: the file of the tokenizer; None for bytes.
    """

    dtype: str
    end_token: int | None
    tokenizer: Path | None = None

    def encode(self, parts: Iterable[Part], *, workers: int) -> Iterator[tuple[bool, bytes]]:
        """Whether it is held out, and its tokens, of each part, in order."""
        if self.tokenizer is None or workers == 1:
            encode = self._prepared()
            for part in parts:
                yield part.held_out, encode(part.pieces)
            return
        try:
            yield from self._encode_in_processes(parts, workers=workers)
        except BrokenProcessPool as error:
            raise OSError(
                f"a process of the tokenizer ended before its time, perhaps for want of memory; take fewer than "
                f"--workers {workers}"
            ) from error

    def _encode_in_processes(self, parts: Iterable[Part], *, workers: int) -> Iterator[tuple[bool, bytes]]:
        waiting: deque[tuple[bool, Future[bytes]]] = deque()
        # spawn: a fork of a process whose torch has started threads may hang.
        context = get_context("spawn")
        with ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(self,)) as pool:
            for part in parts:
                waiting.append((part.held_out, pool.submit(_encode_in_worker, part.pieces)))
                if len(waiting) >= _WAITING * workers:
                    held_out, tokens = waiting.popleft()
                    yield held_out, tokens.result()
            for held_out, tokens in waiting:
                yield held_out, tokens.result()

    def _prepared(self) -> Callable[[list[Piece]], bytes]:
        tokenizer = None if self.tokenizer is None else load_tokenizer(self.tokenizer, used_by="--tokenizer")
        return lambda pieces: b"".join(self._tokens(piece, tokenizer) for piece in pieces)

    def _tokens(self, piece: Piece, tokenizer: Any) -> bytes:
        end = [self.end_token] if piece.ends and self.end_token is not None else []
        if tokenizer is None:
            return piece.text + bytes(end)
        tokens = tokenizer.encode(piece.text.decode("utf-8", errors="replace"), add_special_tokens=False).ids
        return np.asarray([*tokens, *end], dtype=as_stored(self.dtype)).tobytes()


_encode: Callable[[list[Piece]], bytes]


def _start_worker(encoder: Encoder) -> None:
    global _encode
    # The workers are the threads.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _encode = encoder._prepared()


def _encode_in_worker(pieces: list[Piece]) -> bytes:
    return _encode(pieces)
