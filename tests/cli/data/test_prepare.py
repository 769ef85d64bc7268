import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from fuselayers.cli.data import prepare as prepare_module
from fuselayers.cli.data.prepare import prepare
from fuselayers.cli.main import main
from fuselayers.cli.train.data import read_text
from tests.processes import run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twenty small files, one of them longer than the others, and one that is no text."""
    path = tmp_path / "text"
    (path / "inner").mkdir(parents=True)
    for index in range(20):
        (path / ("inner" if index % 2 else ".") / f"{index}.txt").write_text(
            f"a value of file {index}: é\n" * (index + 1)
        )
    (path / "long.md").write_text("a value, and a value\n" * 3000)
    (path / "picture.png").write_bytes(b"\x89PNG\0")
    return path


def _small_pieces(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(prepare_module, "_PIECE_BYTES", size)
    monkeypatch.setattr(prepare_module, "_BATCH_BYTES", 2 * size)


@pytest.mark.parametrize("kind", ["folder", "file", "folder with one file"])
def test_bytes_are_the_text_that_training_reads(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    _small_pieces(monkeypatch, 1000)
    path, suffixes = {
        "folder": (folder, ()),
        "file": (folder / "long.md", ()),
        "folder with one file": (folder, (".md",)),
    }[kind]
    out = tmp_path / "tokens"
    header = prepare(str(path), out, held_out=0.2, suffixes=suffixes)
    text, mapped = read_text(str(path), held_out=0.2, suffixes=suffixes), read_text(str(out))
    assert torch.equal(mapped.train_N, text.train_N)
    assert torch.equal(mapped.held_out_N, text.held_out_N)
    assert mapped.fingerprint == text.fingerprint == header.fingerprint
    assert mapped.num_files == text.num_files == header.documents
    assert (header.dtype, header.vocab_size, header.end_token) == ("uint8", 256, None if header.documents == 1 else 0)
    assert sorted(one.name for one in out.iterdir()) == ["fuselayers_tokens.json", "tokens.bin"]


@pytest.mark.parametrize("size", [500, 1 << 18])
def test_a_tokenizers_ids_are_the_text_whatever_the_pieces(
    folder: Path, tmp_path: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    _small_pieces(monkeypatch, size)
    out = tmp_path / "tokens"
    header = prepare(str(folder), out, held_out=0.2, tokenizer=tokenizer_file)
    assert (header.vocab_size, header.dtype, header.end_token) == (258, "uint16", 257)
    assert (out / "tokenizer.json").read_bytes() == tokenizer_file.read_bytes()
    content = (out / "tokens.bin").read_bytes()
    assert hashlib.sha256(content).hexdigest() == header.fingerprint
    tokens = np.frombuffer(content, "<u2")
    assert len(tokens) == header.train_tokens + header.held_out_tokens
    # The documents are those of the bytes, in their order.
    text, mapped = read_text(str(folder), held_out=0.2), read_text(str(out))
    decode = mapped.vocabulary.decoder()
    for part, part_of_text in ((mapped.train_N, text.train_N), (mapped.held_out_N, text.held_out_N)):
        wanted = bytes(part_of_text.tolist()).decode().replace("\0", "<|endoftext|>")
        assert decode(part.tolist()) == wanted
    assert 256 in tokens  # "va" is one token, and never cut by a piece
    va = bytes(text.train_N.tolist()).count(b"va") + bytes(text.held_out_N.tolist()).count(b"va")
    assert int((tokens == 256).sum()) == va


def test_a_single_file_is_cut_at_a_lines_end(folder: Path, tmp_path: Path, tokenizer_file: Path) -> None:
    out = tmp_path / "tokens"
    header = prepare(str(folder / "long.md"), out, held_out=0.1, tokenizer=tokenizer_file)
    assert header.end_token is None
    text = read_text(str(out))
    decode = text.vocabulary.decoder()
    first, second = decode(text.train_N.tolist()), decode(text.held_out_N.tolist())
    assert first + second == (folder / "long.md").read_text()
    assert first.endswith("\n")
    assert 0.1 * 63_000 <= len(second) < 0.1 * 63_000 + 21
    assert text.vocabulary.prompt == (text.train_N[0].item(),)


def test_a_long_line_is_cut_between_characters(
    tmp_path: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _small_pieces(monkeypatch, 7)
    written = "é€🙂x" * 50
    (tmp_path / "line").write_text(written)
    prepare(str(tmp_path / "line"), tmp_path / "tokens", tokenizer=tokenizer_file)
    text = read_text(str(tmp_path / "tokens"))
    assert text.vocabulary.decoder()([*text.train_N.tolist(), *text.held_out_N.tolist()]) == written


def test_no_more_than_a_batch_and_a_piece_are_held_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _small_pieces(monkeypatch, 1000)
    sizes: list[int] = []
    encoded = prepare_module._encoded

    def watched(pieces: Any, **options: Any) -> bytes:
        sizes.append(sum(len(piece.text) for piece in pieces))
        return encoded(pieces, **options)

    monkeypatch.setattr(prepare_module, "_encoded", watched)
    prepare(str(folder), tmp_path / "tokens")
    assert len(sizes) > 25
    assert max(sizes) <= 3000


def test_a_tokenizer_that_cuts_and_pads_gets_all_of_the_text(
    folder: Path, tmp_path: Path, tokenizer_file: Path
) -> None:
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding()
    cutting = tmp_path / "cutting.json"
    tokenizer.save(str(cutting))
    whole, other = (prepare(str(folder), tmp_path / path.stem, tokenizer=path) for path in (tokenizer_file, cutting))
    assert other.fingerprint == whole.fingerprint


def test_an_error_leaves_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=rf"^cannot write {tmp_path / 'tokens'}: No space left on device$"):
        prepare(str(folder), tmp_path / "tokens")
    assert sorted(tmp_path.iterdir()) == before


_KILLED = """
import os, sys
from fuselayers.cli.data.prepare import prepare
os.rename = lambda *names: os._exit(9)
prepare(sys.argv[1], __import__("pathlib").Path(sys.argv[2]))
"""


def test_a_kill_leaves_no_folder_of_that_name(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "tokens"
    assert run(_KILLED, str(folder), str(out)).code == 9
    assert not out.exists()
    assert len(list(tmp_path.glob("tokens.*.part"))) == 1
    prepare(str(folder), out)
    assert torch.equal(read_text(str(out)).train_N, read_text(str(folder)).train_N)


def test_wrong_arguments_are_refused(folder: Path, tmp_path: Path, tokenizer_file: Path) -> None:
    out = tmp_path / "tokens"
    with pytest.raises(FileExistsError, match=rf"^{folder} is there already; remove it, or choose another --out$"):
        prepare(str(folder), folder)
    with pytest.raises(ValueError, match=r"^--held-out must be above 0 and below 1, got 1\.0$"):
        prepare(str(folder), out, held_out=1.0)
    with pytest.raises(ValueError, match=r"^--end-token is of a tokenizer: give --tokenizer too, or leave it out$"):
        prepare(str(folder), out, end_token="</s>")
    with pytest.raises(ValueError, match=r"^--end-token must be a token of the tokenizer, got '</s>'$"):
        prepare(str(folder), out, tokenizer=tokenizer_file, end_token="</s>")
    with pytest.raises(ValueError, match=r"0\.txt is not a file of the package tokenizers \(tokenizer\.json\): "):
        prepare(str(folder), out, tokenizer=folder / "0.txt")
    with pytest.raises(FileNotFoundError, match=r"cannot read the text: there is no /nowhere"):
        prepare("/nowhere", out)
    assert not out.exists()
    prepare(str(folder), out)
    with pytest.raises(ValueError, match=rf"^{out} holds tokens already; give the text that they were made of$"):
        prepare(str(out), tmp_path / "again")


def test_the_token_that_ends_a_document_must_be_clear(folder: Path, tmp_path: Path, tokenizer_file: Path) -> None:
    for added, text in (
        (["</s>"], r"^the tokenizer has <\|endoftext\|> and </s>; name the token that ends a document: --end-token$"),
        (None, r"^the tokenizer has none of <\|endoftext\|>, <\|end_of_text\|>, </s>, <eos>, \[SEP\]; name the token"),
    ):
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
        if added is None:
            content = tokenizer_file.read_text().replace("<|endoftext|>", "<|other|>")
            tokenizer = Tokenizer.from_str(content)
        else:
            tokenizer.add_special_tokens(added)
        path = tmp_path / "other.json"
        tokenizer.save(str(path))
        with pytest.raises(ValueError, match=text):
            prepare(str(folder), tmp_path / "tokens", tokenizer=path)
    header = prepare(str(folder), tmp_path / "tokens", tokenizer=path, end_token="<|other|>")
    assert header.end_token == 257


def test_without_the_package_its_name_is_said(
    folder: Path, tmp_path: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    text = r"^--tokenizer needs the package tokenizers, which cannot be imported: .*; pip install tokenizers$"
    with pytest.raises(ValueError, match=text):
        prepare(str(folder), tmp_path / "tokens", tokenizer=tokenizer_file)


def test_the_command_says_what_it_wrote(
    folder: Path, tmp_path: Path, tokenizer_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "tokens"
    arguments = ["data", "prepare", str(folder), "--out", str(out), "--suffixes", ".txt", "--held-out", "0.3"]
    assert main([*arguments, "--tokenizer", str(tokenizer_file)]) == 0
    printed = capsys.readouterr().out.splitlines()
    text = read_text(str(out))
    counts = f"{text.train_N.numel():,} tokens to learn from and {text.held_out_N.numel():,} held out"
    assert printed[0].startswith(f"{counts}, of 20 files of {folder}, as uint16, in ")
    assert printed[1] == f"train on it: fuselayers train data.path={out} model.vocab_size=258"
    assert main(arguments) == 2
    assert capsys.readouterr().err == f"fuselayers: {out} is there already; remove it, or choose another --out\n"
