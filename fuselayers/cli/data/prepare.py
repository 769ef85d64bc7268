"""Writes a folder of tokens, piece by piece, and whole or not at all."""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.progress import Progress

from ..documents import Document, Documents, find_documents, open_text
from ..files import whole_folder
from ..token_folder import (
    TOKENIZER_NAME,
    TOKENS_NAME,
    TokenHeader,
    as_stored,
    dtype_for,
    is_token_folder,
    write_header,
)
from ..vocabulary import BYTES, end_token_of, load_tokenizer, tokenizer_size

_PIECE_BYTES: Final = 1 << 18
_BATCH_BYTES: Final = 1 << 22
_END_OF_FILE: Final = 0


@dataclass(frozen=True)
class _Piece:
    """A part of a document: whole lines, as bytes, and whether the document ends after it."""

    text: bytes
    ends: bool


def prepare(
    text: str,
    out: Path,
    *,
    held_out: float = 0.1,
    suffixes: Sequence[str] = (),
    tokenizer: Path | None = None,
    end_token: str | None = None,
    console: Console | None = None,
) -> TokenHeader:
    """Write text as a folder of tokens.

    A tokenizer gets pieces of less than 512 kB that end with a line, so that neither the memory nor the tokens depend
    on the size of a file or on the number of cores. Bytes that are no UTF-8 become U+FFFD for it.

    Args:
        text: a text file or a folder, as `data.path` takes it.
        out: the folder to make.
        held_out: as `data.held_out`.
        suffixes: as `data.suffixes`.
        tokenizer: a file of the package `tokenizers`; None for bytes.
        end_token: the token that ends a document; None for the tokenizer's own.
        console: a terminal shows a bar there.

    Raises:
        ValueError: no text, a wrong argument, or the tokenizer cannot be read.
        FileExistsError: `out` is there.
        OSError: a file cannot be read or written.
    """
    if not 0 < held_out < 1:
        raise ValueError(f"--held-out must be above 0 and below 1, got {held_out}")
    if end_token is not None and tokenizer is None:
        raise ValueError("--end-token is of a tokenizer: give --tokenizer too, or leave it out")
    if out.exists():
        raise FileExistsError(f"{out} is there already; remove it, or choose another --out")
    if is_token_folder(Path(text)):
        raise ValueError(f"{text} holds tokens already; give the text that they were made of")
    found = find_documents(text, held_out=held_out, suffixes=suffixes)
    several = found.num_files > 1
    loaded: Any = None
    if tokenizer is None:
        size, end = BYTES.size, _END_OF_FILE if several else None
    else:
        loaded = load_tokenizer(tokenizer, used_by="--tokenizer")
        size, end = tokenizer_size(loaded), end_token_of(loaded, end_token) if several else None
        found = found if several else _at_a_lines_end(found)
    dtype = dtype_for(size)
    encode = partial(_encoded, tokenizer=loaded, dtype=dtype, end_token=end)
    with whole_folder(out) as folder:
        if tokenizer is not None:
            shutil.copyfile(tokenizer, folder / TOKENIZER_NAME)
        cuts_lines = tokenizer is not None
        sizes, fingerprint = _write_tokens(folder / TOKENS_NAME, found, encode, cuts_lines=cuts_lines, console=console)
        itemsize = as_stored(dtype).itemsize
        header = TokenHeader(
            vocab_size=size,
            dtype=dtype,
            train_tokens=sizes[False] // itemsize,
            held_out_tokens=sizes[True] // itemsize,
            documents=found.num_files,
            end_token=end,
            tokenizer=tokenizer is not None,
            fingerprint=fingerprint,
            source=str(found.source),
        )
        write_header(folder, header)
    return header


def _write_tokens(
    path: Path,
    found: Documents,
    encode: Callable[[Sequence[_Piece]], bytes],
    *,
    cuts_lines: bool,
    console: Console | None,
) -> tuple[dict[bool, int], str]:
    """Write the tokens to learn from, then those held out; return the bytes of both, and the file's SHA-256."""
    digest, sizes = hashlib.sha256(), {False: 0, True: 0}
    shows = console is not None and console.is_terminal
    with Progress(console=console, disable=not shows, transient=True) as progress, open(path, "xb") as file:
        task = progress.add_task("bytes of text", total=sum(_size(document) for document in found.parts))
        for held_out in sizes:
            documents = [document for document in found.parts if document.held_out is held_out]
            for pieces in _batches(documents, cuts_lines=cuts_lines):
                tokens = encode(pieces)
                file.write(tokens)
                digest.update(tokens)
                sizes[held_out] += len(tokens)
                progress.advance(task, sum(len(piece.text) for piece in pieces))
        file.flush()
        os.fsync(file.fileno())
    return sizes, digest.hexdigest()


def _encoded(pieces: Sequence[_Piece], *, tokenizer: Any, dtype: str, end_token: int | None) -> bytes:
    """The tokens of pieces as they are stored; the tokenizer takes the pieces in parallel, on all cores."""
    ends = [[end_token] if piece.ends and end_token is not None else [] for piece in pieces]
    if tokenizer is None:
        return b"".join(piece.text + bytes(end) for piece, end in zip(pieces, ends, strict=True))
    texts = [piece.text.decode("utf-8", errors="replace") for piece in pieces]
    found = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    rows = [np.asarray([*one.ids, *end], as_stored(dtype)) for one, end in zip(found, ends, strict=True)]
    return b"".join(row.tobytes() for row in rows)


def _batches(documents: Iterable[Document], *, cuts_lines: bool) -> Iterator[list[_Piece]]:
    """The documents' pieces, as many at a time as are encoded together."""
    pieces: list[_Piece] = []
    total = 0
    for document in documents:
        for piece in _pieces(document, cuts_lines=cuts_lines):
            pieces.append(piece)
            total += len(piece.text)
            if total >= _BATCH_BYTES:
                yield pieces
                pieces, total = [], 0
    if pieces:
        yield pieces


def _pieces(document: Document, *, cuts_lines: bool) -> Iterator[_Piece]:
    with open_text(document.path) as file:
        file.seek(document.start)
        left = _size(document)
        rest = b""
        while left > 0 and (read := file.read(min(_PIECE_BYTES, left))):
            left -= len(read)
            rest += read
            if len(read) == _PIECE_BYTES:
                cut = _end_of_lines(rest) if cuts_lines else len(rest)
                yield _Piece(rest[:cut], ends=False)
                rest = rest[cut:]
        yield _Piece(rest, ends=True)


def _end_of_lines(text: bytes) -> int:
    """The length of the whole lines at the start; of the whole UTF-8 characters, where there is no line's end."""
    end = text.rfind(b"\n") + 1
    if end:
        return end
    # A character has at most three bytes after its first one.
    for place in range(len(text) - 1, max(len(text) - 4, 0), -1):
        if text[place] & 0b1100_0000 != 0b1000_0000:
            return place
    return len(text)


def _at_a_lines_end(found: Documents) -> Documents:
    """The two parts of a single file with whole lines in each; the held-out part takes the line that was cut."""
    train, held_out = found.parts
    assert train.stop is not None
    start = max(0, train.stop - _PIECE_BYTES)
    with open_text(train.path) as file:
        file.seek(start)
        cut = start + _end_of_lines(file.read(train.stop - start))
    return replace(found, parts=(replace(train, stop=cut), replace(held_out, start=cut)))


def _size(document: Document) -> int:
    return (document.path.stat().st_size if document.stop is None else document.stop) - document.start
