import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, models

from fuselayers.cli.vocabulary import BYTES, Vocabulary, load_tokenizer, tokenizer_size


def test_bytes_decode_as_utf8_and_other_tokens_become_a_zero_byte() -> None:
    assert BYTES.decoder()([*"é€".encode(), 300, 0xFF]) == "é€\0\N{REPLACEMENT CHARACTER}"
    assert (BYTES.unit, BYTES.size, bytes(BYTES.prompt)) == ("byte", 256, b"\n")


def test_a_tokenizer_decodes_its_own_tokens_alone(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"one": 0, "two": 1, "three": 7}, unk_token="one"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    # Ids may have gaps; the largest one counts.
    assert tokenizer_size(tokenizer) == 8
    vocabulary = Vocabulary(8, (1,), tmp_path / "tokenizer.json")
    assert vocabulary.unit == "token"
    assert vocabulary.decoder()([1, 7, 9, 0]) == "two three one"


def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(
        ValueError, match=r"tokenizer\.json is not a file of the package tokenizers \(tokenizer\.json\): "
    ):
        Vocabulary(8, (1,), tmp_path / "tokenizer.json").decoder()


def test_a_tokenizers_that_is_too_old_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", SimpleNamespace(Tokenizer=object))
    with pytest.raises(ValueError, match=r"^--tokenizer needs tokenizers 0\.20 or newer; pip install -U tokenizers$"):
        load_tokenizer(tmp_path / "tokenizer.json", used_by="--tokenizer")
