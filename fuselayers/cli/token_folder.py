"""A folder of tokens, the format between `fuselayers data prepare` and `fuselayers train`.

    tokens.bin               the tokens as unsigned little-endian integers of 1, 2 or 4 bytes, and nothing else: those
                             to learn from, then those held out
    fuselayers_tokens.json   `TokenHeader`
    tokenizer.json           the tokenizer, where there is one

`sha256sum tokens.bin` gives the header's fingerprint. Nothing here imports torch, which `data prepare` does not need.
"""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

import numpy as np

from .files import write_text

HEADER_NAME: Final = "fuselayers_tokens.json"
TOKENS_NAME: Final = "tokens.bin"
TOKENIZER_NAME: Final = "tokenizer.json"
_FORMAT: Final = "fuselayers.tokens"
_VERSION: Final = 1
_DTYPES: Final = {"uint8": "<u1", "uint16": "<u2", "uint32": "<u4"}


@dataclass(frozen=True)
class TokenHeader:
    """The properties of the tokens of a folder.

    Args:
        vocab_size: every token is below it.
        dtype: uint8, uint16 or uint32.
        train_tokens: their number, at the start of the file.
        held_out_tokens: their number, at the end of the file.
        documents: their number.
        end_token: it ends every document; None where the text is one document.
        tokenizer: whether the tokens are of the tokenizer in the folder; else they are bytes.
        fingerprint: the SHA-256 of the file of tokens.
        source: the text they were made of.
    """

    vocab_size: int
    dtype: str
    train_tokens: int
    held_out_tokens: int
    documents: int
    end_token: int | None
    tokenizer: bool
    fingerprint: str
    source: str


def dtype_for(vocab_size: int) -> str:
    """The narrowest dtype for tokens below `vocab_size`.

    >>> [dtype_for(size) for size in (256, 257, 65536, 65537)]
    ['uint8', 'uint16', 'uint16', 'uint32']
    """
    return "uint8" if vocab_size <= 1 << 8 else "uint16" if vocab_size <= 1 << 16 else "uint32"


def as_stored(dtype: str) -> np.dtype[Any]:
    """numpy's dtype of the file of tokens.

    >>> as_stored("uint16").itemsize
    2
    """
    return np.dtype(_DTYPES[dtype])


def is_token_folder(path: Path) -> bool:
    """Whether `fuselayers data prepare` wrote this folder."""
    return (path / HEADER_NAME).is_file()


def write_header(folder: Path, header: TokenHeader) -> None:
    """Write the header, last of a folder's files."""
    write_text(folder / HEADER_NAME, json.dumps({"format": _FORMAT, "version": _VERSION, **asdict(header)}, indent=1))


def read_header(folder: Path) -> TokenHeader:
    """Read the header, and compare the size of the file of tokens with it.

    Raises:
        ValueError: it is damaged or of another version, or the file of tokens is shorter or longer.
        OSError: a file cannot be read.
    """
    path = folder / HEADER_NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or content.pop("format", None) != _FORMAT:
            raise ValueError("it is of another format")
        version = content.pop("version", None)
        if version != _VERSION:
            raise ValueError(f"it has version {version!r:.40}, this fuselayers reads version {_VERSION}")
        header = _checked(content)
    except ValueError as error:
        raise ValueError(
            f"{path} is not the header of a folder of tokens: {error}; write it again by fuselayers data prepare"
        ) from error
    tokens = folder / TOKENS_NAME
    wanted = (header.train_tokens + header.held_out_tokens) * as_stored(header.dtype).itemsize
    size = tokens.stat().st_size
    if size != wanted:
        raise ValueError(
            f"{tokens} must have {wanted:,} bytes, as {HEADER_NAME} beside it says, got {size:,}; "
            "write the folder again by fuselayers data prepare"
        )
    return header


def _checked(content: dict[str, Any]) -> TokenHeader:
    names = [field.name for field in fields(TokenHeader)]
    if sorted(content) != sorted(names):
        raise ValueError(f"it must have {', '.join(names)}")
    counts = ("vocab_size", "train_tokens", "held_out_tokens", "documents")
    if not all(type(content[name]) is int and content[name] >= 0 for name in counts):
        raise ValueError(f"{', '.join(counts)} must be whole numbers")
    if content["dtype"] not in _DTYPES or content["vocab_size"] > 1 << 8 * as_stored(content["dtype"]).itemsize:
        raise ValueError(f"dtype must be one of {', '.join(_DTYPES)} that holds vocab_size={content['vocab_size']}")
    end = content["end_token"]
    if end is not None and not (type(end) is int and 0 <= end < content["vocab_size"]):
        raise ValueError("end_token must be null or a token")
    if not all(isinstance(content[name], str) for name in ("fingerprint", "source")):
        raise ValueError("fingerprint and source must be text")
    if not isinstance(content["tokenizer"], bool):
        raise ValueError("tokenizer must be true or false")
    return TokenHeader(**content)
