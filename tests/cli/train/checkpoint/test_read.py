from __future__ import annotations

import json
import os
import pickle
import random
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fuselayers.cli.train.checkpoint import find_checkpoint, read_checkpoint, run_of, save, whole_tensors
from tests.cli.train.checkpoint.test_save import assert_is, tensors


def _rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change an index and give it the right checksum, as a stranger would."""
    content = json.loads((path / "index.json").read_bytes())
    del content["crc32"]
    change(content)
    body = json.dumps(content)[1:].encode()
    (path / "index.json").write_bytes(f'{{"crc32": "{zlib.crc32(body):08x}",\n'.encode() + body)


def test_a_run_or_a_checkpoint_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [save(tmp_path / "run" / "checkpoints", tensors(step), step=step) for step in (99, 100)]
    assert find_checkpoint(str(tmp_path / "run")) == paths[1]
    assert find_checkpoint(str(tmp_path / "run" / "checkpoints")) == paths[1]
    assert find_checkpoint(str(paths[0])) == paths[0]
    assert find_checkpoint(str(tmp_path)) == tmp_path
    assert run_of(paths[0]) == tmp_path / "run"
    assert run_of(tmp_path / "copy" / "step-000099") is None
    monkeypatch.chdir(paths[0])
    assert run_of(Path("../step-000100")) == tmp_path / "run"
    monkeypatch.chdir(paths[0].parent)
    assert run_of(Path("step-000100")) == tmp_path / "run"
    monkeypatch.chdir(tmp_path)
    assert run_of(Path("run/checkpoints/step-000100")) == Path("run")


@pytest.mark.parametrize("kind", ["nowhere", "file", "folder"])
def test_what_is_no_checkpoint_is_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "run"
    found = {"nowhere": "not there", "file": "a file", "folder": "a folder without one"}[kind]
    if kind == "file":
        path.touch()
    elif kind == "folder":
        path.mkdir()
    text = rf"^no checkpoint {path}, it is {found}; name a run, or a checkpoint such as \S+/checkpoints/step-000200$"
    with pytest.raises(FileNotFoundError, match=text):
        read_checkpoint(path)


@pytest.mark.parametrize("name", ["rank-00000.bin", "index.json"])
@pytest.mark.parametrize("damage", ["flipped", "cut", "missing"])
def test_beside_a_damaged_one_the_other_is_offered(tmp_path: Path, name: str, damage: str) -> None:
    older, newer = (save(tmp_path, tensors(step), step=step) for step in (5, 6))
    for path, other, step in ((newer, older, 5), (older, newer, 6)):
        file = path / name
        content = file.read_bytes()
        if damage == "missing":
            file.unlink()
        else:
            file.write_bytes(content[:30] + (bytes([content[30] ^ 1]) + content[31:] if damage == "flipped" else b""))
        text = rf"{path}.*; {other.name} beside it is whole \(step {step}\): train\.resume={other}$"
        with pytest.raises((ValueError, FileNotFoundError), match=text):
            read_checkpoint(path)
        file.write_bytes(content)


def test_two_damaged_ones_are_not_offered(tmp_path: Path) -> None:
    paths = [save(tmp_path, tensors(step), step=step) for step in (5, 6)]
    for path in paths:
        (path / "rank-00000.bin").write_bytes(b"")
    text = r"or a damaged one: the checksum of model\.\w+ in rank-00000\.bin is wrong$"
    with pytest.raises(ValueError, match=text):
        read_checkpoint(paths[0])


def test_a_flipped_bit_is_found_or_changes_nothing(tmp_path: Path) -> None:
    path = save(tmp_path, tensors(), step=5)
    whole = {file: file.read_bytes() for file in path.iterdir()}
    found = 0
    for seed in range(200):
        chance = random.Random(seed)
        file = chance.choice(sorted(whole))
        damaged = bytearray(whole[file])
        damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
        file.write_bytes(damaged)
        try:
            assert_is(path, tensors(), step=5)
        except ValueError as error:
            assert f"{path} is not a checkpoint of fuselayers, or a damaged one: the checksum" in str(error)  # noqa: PT017
            found += 1
        file.write_bytes(whole[file])
    # The rest is padding between the numbers.
    assert found > 130


def _set(name: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda content: content.__setitem__(name, value)


def _of_weight(**changes: object) -> Callable[[dict[str, Any]], object]:
    return lambda content: content["tensors"]["model.weight"].update(changes)


def _half_twice(content: dict[str, Any]) -> None:
    """The sizes add up, and half of the numbers are in no chunk."""
    weight = content["tensors"]["model.weight"]
    (chunk,) = weight["chunks"]
    half = [chunk["shape"][0] // 2, *chunk["shape"][1:]]
    weight["chunks"] = 2 * [{**chunk, "shape": half, "length": chunk["length"] // 2}]


def _of_chunk(**changes: object) -> Callable[[dict[str, Any]], object]:
    return lambda content: content["tensors"]["model.weight"]["chunks"][0].update(changes)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_set("format", "other"), "is not a checkpoint of fuselayers: it was written by something else"),
        (lambda content: content.pop("format"), "is not a checkpoint of fuselayers: it was written by something else"),
        (_set("version", 99), "has version 99 of the checkpoint format, this fuselayers reads version 3; use the"),
        (_set("version", [1]), "has version [1] of the checkpoint format, this fuselayers reads version 3; use the"),
        (_set("step", -3), "cannot be continued: its step must be an int of at least 0, got -3"),
        (_set("step", 2.5), "cannot be continued: its step must be an int of at least 0, got 2.5"),
        (_set("step", True), "cannot be continued: its step must be an int of at least 0, got True"),
        (_set("config_yaml", 3), "cannot be continued: its config_yaml must be a text, got 3"),
        (lambda content: content.pop("curve"), "cannot be continued: its curve must be a text, got None"),
        (_set("tensors", [1]), "or a damaged one: tensors must be a mapping, got [1]"),
        (_set("tensors", {"x" * 10_000: 1}), "or a damaged one: the tensor 'xxxxx"),
        (_of_weight(more=1), "or a damaged one: the tensor 'model.weight' must have dtype, shape and chunks"),
        (_of_weight(dtype="load"), "or a damaged one: the dtype of 'model.weight' is 'load'"),
        (_of_weight(shape=[4, -3]), "or a damaged one: the shape or a chunk of 'model.weight' is wrong"),
        (_of_weight(shape=[4, 2]), "or a damaged one: the shape or a chunk of 'model.weight' is wrong"),
        (_of_weight(shape=[4, 4]), "or a damaged one: the chunks of 'model.weight' do not make up the tensor"),
        (_half_twice, "or a damaged one: the chunks of 'model.weight' do not make up the tensor"),
        (_of_weight(chunks=[]), "or a damaged one: the chunks of 'model.weight' do not make up the tensor"),
        (_of_weight(chunks=3), "or a damaged one: the shape or a chunk of 'model.weight' is wrong"),
        (_of_weight(chunks=[{}]), "or a damaged one: the shape or a chunk of 'model.weight' is wrong"),
        (_of_chunk(file="../index.json"), "or a damaged one: the shape or a chunk of 'model.weight' is wrong"),
        (_of_chunk(file="/dev/zero"), "or a damaged one: the shape or a chunk of 'model.weight' is wrong"),
        (_of_chunk(offset=1), "or a damaged one: the shape or a chunk of 'model.weight' is wrong"),
        (_of_chunk(length=49), "or a damaged one: the shape or a chunk of 'model.weight' is wrong"),
        (_of_chunk(offset=1 << 40), "or a damaged one: the checksum of model.weight in rank-00000.bin is wrong"),
        (_of_chunk(file="index.json"), "or a damaged one: the checksum of model.weight in index.json is wrong"),
        (_of_chunk(file="other.bin"), "or a damaged one: the checksum of model.weight in other.bin is wrong"),
    ],
)
def test_wrong_contents_are_named(tmp_path: Path, change: Callable[[dict[str, Any]], object], text: str) -> None:
    path = save(tmp_path, tensors(), step=5)
    _rewrite(path, change)
    with pytest.raises(ValueError, match=re.escape(text)) as caught:
        read_checkpoint(path)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("body", [b"", b"[1]", b'"a": ' + b"[" * 100_000, b'"step": ' + b"1" * 5000 + b"}", b"\xff"])
def test_an_index_that_is_no_json_is_named(tmp_path: Path, body: bytes) -> None:
    path = save(tmp_path, tensors(), step=5)
    (path / "index.json").write_bytes(f'{{"crc32": "{zlib.crc32(body):08x}",\n'.encode() + body)
    with pytest.raises(ValueError, match=r"or a damaged one: index\.json is no JSON$"):
        read_checkpoint(path)


def test_reading_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path, tensors(), step=5)

    def refused(*arguments: object, **named: object) -> None:
        raise AssertionError("a pickle is read")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, refused)
    assert_is(path, tensors(), step=5)
    # Files that other writers leave in a checkpoint are not looked at.
    (path / ".metadata").write_bytes(pickle.dumps(os.getcwd))
    assert_is(path, tensors(), step=5)


def test_a_pipe_in_a_checkpoint_is_not_waited_for(tmp_path: Path) -> None:
    path = save(tmp_path, tensors(), step=5)
    (path / "rank-00000.bin").unlink()
    os.mkfifo(path / "rank-00000.bin")
    with pytest.raises(ValueError, match=r"or a damaged one: the checksum of \S+ in rank-00000\.bin is wrong$"):
        read_checkpoint(path)


def test_a_copy_elsewhere_is_a_checkpoint_too(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoints", tensors(), step=5)
    copy = shutil.copytree(path, tmp_path / "mine")
    assert_is(copy, tensors(), step=5)
    assert list(whole_tensors(copy, read_checkpoint(copy), prefix="optimizer.")) == ["weight.step"]
