import os
import re
from pathlib import Path

import pytest
import torch

from fuselayers.cli.train.data import evaluation_batches, read_text, training_batch
from fuselayers.cli.train.start import sequence_length
from fuselayers.configs import compose


def _folder(path: Path, number: int) -> Path:
    for index in range(number):
        (path / f"part{index % 3}").mkdir(exist_ok=True)
        (path / f"part{index % 3}" / f"file{index}.py").write_text(f"content of file {index}\n")
    return path


def _bytes(text_N: torch.Tensor) -> bytes:
    return text_N.numpy().tobytes()


def test_the_standard_library_is_text_without_its_tests_and_without_site_packages() -> None:
    text = read_text()
    assert (Path(text.source) / "os.py").samefile(os.__file__)
    files = [path for path in Path(text.source).rglob("*.py") if not {"site-packages", "test"} & set(path.parts)]
    assert 0.8 * len(files) < text.num_files <= len(files)
    assert b"def popen" in _bytes(text.train_N) + _bytes(text.held_out_N)
    share = text.held_out_N.numel() / (text.train_N.numel() + text.held_out_N.numel())
    assert share == pytest.approx(0.1, abs=1e-6)


def test_every_byte_of_a_folder_is_in_exactly_one_part(tmp_path: Path) -> None:
    folder = _folder(tmp_path, 40)
    text = read_text(str(folder), held_out=0.25)
    parts = (_bytes(text.train_N) + _bytes(text.held_out_N)).split(b"\0")
    assert sorted(parts[:-1]) == sorted(path.read_bytes() for path in folder.rglob("*.py"))
    assert parts[-1] == b""
    assert text.held_out_N.numel() == pytest.approx(0.25 * (text.train_N.numel() + text.held_out_N.numel()), abs=1)


def test_the_held_out_text_is_the_same_wherever_the_folder_lies_and_of_all_its_parts(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = (read_text(str(_folder(tmp_path / name, 60))).held_out_N for name in ("a", "b"))
    assert torch.equal(first, second)
    parts = {int(line.split()[-1]) % 3 for line in _bytes(first).decode().split("\0")[1:] if line}
    assert len(parts) > 1


def test_a_folder_of_any_text_needs_no_suffixes(tmp_path: Path) -> None:
    written = {"a.txt": b"plain", "b.md": b"# title", "c": "\u00fc".encode(), "d.png": b"\x89PNG\0", ".hidden": b"no"}
    for name, content in written.items():
        (tmp_path / name).write_bytes(content)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "broken").symlink_to("nowhere")
    (tmp_path / "empty.py").touch()
    for name in ("site-packages", "__pycache__", ".git", "test"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.py").write_text("other people's")
    text = read_text(str(tmp_path))
    parts = (_bytes(text.train_N) + _bytes(text.held_out_N)).split(b"\0")
    assert sorted(parts[:-1]) == sorted([b"plain", b"# title", "\u00fc".encode()])
    assert read_text(str(tmp_path), suffixes=(".md",)).num_files == 1


def test_the_end_of_a_single_file_is_held_out(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(200)))
    text = read_text(str(path), held_out=0.1)
    assert _bytes(text.train_N) == bytes(range(180))
    assert _bytes(text.held_out_N) == bytes(range(180, 200))


def test_errors_name_the_path_and_what_to_do(tmp_path: Path) -> None:
    empty_file, empty_folder = tmp_path / "empty.txt", tmp_path / "folder"
    empty_file.touch()
    empty_folder.mkdir()
    (empty_folder / "a.txt").write_text("not python")
    with pytest.raises(FileNotFoundError, match=r"there is no .*/missing; set data\.path= to a text file or a folder"):
        read_text(str(tmp_path / "missing"))
    with pytest.raises(ValueError, match=rf"{empty_file} holds no text; set data\.path= to"):
        read_text(str(empty_file))
    with pytest.raises(ValueError, match=rf"{empty_folder} holds no text; set data\.path= to"):
        read_text(str(empty_folder), suffixes=(".py", ".rst"))


def test_a_text_shorter_than_a_sequence_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"x" * 100)
    text = read_text(str(path), held_out=0.1)
    assert sequence_length(compose(overrides=["data.sequence_length=9"]), text) == 9
    for part, length in (("held-out", 10), ("training", 90)):
        said = f"the {part} text must be longer than a sequence of {length} bytes, got {length} bytes from {path}; give"
        with pytest.raises(ValueError, match=re.escape(said)):
            sequence_length(compose(overrides=[f"data.sequence_length={length}"]), text)


def test_batches_depend_on_seed_step_and_micro_batch_alone() -> None:
    train_N = torch.randint(256, (10_000,)).to(torch.uint8)
    size = {"batch_size": 4, "sequence_length": 16}
    first = training_batch(train_N, seed=1, step=7, **size)[0]
    torch.manual_seed(99)
    state = torch.get_rng_state()
    assert torch.equal(first, training_batch(train_N, seed=1, step=7, **size)[0])
    assert torch.equal(state, torch.get_rng_state())
    for other in ({"seed": 2, "step": 7}, {"seed": 1, "step": 8}, {"seed": 1, "step": 7, "micro_batch": 1}):
        assert not torch.equal(first, training_batch(train_N, **other, **size)[0])


@pytest.mark.parametrize("size", [17, 18, 1000])
def test_evaluation_covers_the_held_out_text_from_its_start_to_its_end(size: int) -> None:
    held_out_N = (torch.arange(size) % 256).to(torch.uint8)
    batches = evaluation_batches(held_out_N, num_batches=3, batch_size=2, sequence_length=16)
    assert [tokens_BT.shape for tokens_BT, _ in batches] == [(2, 16)] * 3
    assert batches[0][0][0, 0] == held_out_N[0]
    assert batches[-1][1][-1, -1] == held_out_N[-1]
