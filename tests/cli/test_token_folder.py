import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fuselayers.cli.token_folder import TokenHeader, read_header, write_header

_HEADER = TokenHeader(
    vocab_size=300,
    dtype="uint16",
    train_tokens=10,
    held_out_tokens=2,
    documents=3,
    end_token=299,
    tokenizer=True,
    fingerprint="ab",
    source="here",
)


def _write(folder: Path, header: TokenHeader = _HEADER) -> Path:
    write_header(folder, header)
    (folder / "tokens.bin").write_bytes(bytes(24))
    return folder


@pytest.mark.parametrize("header", [_HEADER, replace(_HEADER, end_token=None, tokenizer=False)])
def test_a_header_comes_back_as_it_was(tmp_path: Path, header: TokenHeader) -> None:
    assert read_header(_write(tmp_path, header)) == header


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"format": "other"}, "it is of another format; write it again by fuselayers data prepare"),
        ({"version": 2}, "it has version 2, this fuselayers reads version 1"),
        ({"more": 1}, "it must have vocab_size, dtype, train_tokens"),
        ({"train_tokens": -1}, "vocab_size, train_tokens, held_out_tokens, documents must be whole numbers"),
        ({"vocab_size": True}, "vocab_size, train_tokens, held_out_tokens, documents must be whole numbers"),
        ({"dtype": "float32"}, "dtype must be one of uint8, uint16, uint32 that holds vocab_size=300"),
        ({"dtype": "uint8"}, "dtype must be one of uint8, uint16, uint32 that holds vocab_size=300"),
        ({"end_token": 300}, "end_token must be null or a token"),
        ({"source": 3}, "fingerprint and source must be text"),
        ({"tokenizer": "yes"}, "tokenizer must be true or false"),
    ],
)
def test_a_wrong_header_is_refused(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    path = _write(tmp_path) / "fuselayers_tokens.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=rf"^{path} is not the header of a folder of tokens: {text}"):
        read_header(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", ""])
def test_what_is_no_json_object_is_refused(tmp_path: Path, content: str) -> None:
    (_write(tmp_path) / "fuselayers_tokens.json").write_text(content)
    with pytest.raises(ValueError, match=r"is not the header of a folder of tokens: "):
        read_header(tmp_path)


def test_a_file_of_tokens_of_another_size_is_refused(tmp_path: Path) -> None:
    (_write(tmp_path) / "tokens.bin").write_bytes(bytes(23))
    text = (
        r"tokens\.bin must have 24 bytes, as fuselayers_tokens\.json beside it says, got 23; write the folder again by"
    )
    with pytest.raises(ValueError, match=text):
        read_header(tmp_path)
