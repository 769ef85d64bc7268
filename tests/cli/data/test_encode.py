from pathlib import Path

import pytest

from fuselayers.cli.data.encode import Encoder, Part, Piece

_PARTS = [Part([Piece(b"a line\n", ends=False), Piece(b"\xff", ends=True)], held_out=False), Part([], held_out=True)]


def test_bytes_stay_as_they_are_and_an_end_is_put_after_a_document() -> None:
    assert list(Encoder("uint8", 0).encode(_PARTS, workers=4)) == [(False, b"a line\n\xff\0"), (True, b"")]
    assert list(Encoder("uint8", None).encode(_PARTS, workers=1)) == [(False, b"a line\n\xff"), (True, b"")]


def test_a_process_that_dies_is_an_error_of_one_line(tmp_path: Path) -> None:
    # Its start fails, since there is no such file.
    encoder = Encoder("uint16", None, tmp_path / "missing.json")
    text = r"^a process of the tokenizer ended before its time, perhaps .*; take fewer than --workers 2$"
    with pytest.raises(OSError, match=text):
        list(encoder.encode(_PARTS, workers=2))
