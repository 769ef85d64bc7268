import hashlib
import json
import os
import pickle
import random
import re
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fuselayers.cli.train.checkpoint import Content, find_checkpoint, read_checkpoint, run_of, save, whole_tensors
from tests.processes import run as run_program


def tensors(step: int = 5) -> dict[str, Tensor]:
    """A state whose numbers depend on the step, in several dtypes and layouts. One tensor is empty, two are tied."""
    weight = torch.full((3, 4), float(step))
    return {
        "model.weight": weight.t(),
        "model.tied": weight,
        "model.half": torch.full((7,), step, dtype=torch.bfloat16),
        "model.empty": torch.empty(0, 3),
        "optimizer.weight.step": torch.tensor(float(step)),
        "model.count": torch.tensor([[step]], dtype=torch.int64),
        "model.flag": torch.tensor([True, False, True]),
    }


def assert_is(path: Path, wanted: dict[str, Tensor], *, step: int) -> None:
    """The checkpoint is whole, and holds these numbers."""
    assert read_checkpoint(path).step == step
    got = whole_tensors(path)
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor), name


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Limit the size of files, so that writes fail half-way, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_what_is_saved_is_read_also_from_a_copy(tmp_path: Path) -> None:
    content = Content(5, config_yaml="train: {}\n", text_fingerprint="abc", curve="step,loss\n1,é\n")
    path = save(tmp_path / "checkpoints", tensors(), content)
    assert path == tmp_path / "checkpoints" / "step-000005"
    assert read_checkpoint(path) == content
    assert_is(path.rename(tmp_path / "copy"), tensors(), step=5)


def test_the_last_ones_are_kept_and_those_of_another_course_go(tmp_path: Path) -> None:
    for step in (5, 40, 300, 1_000_000):
        save(tmp_path, tensors(step), Content(step), keep=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000040", "step-000300", "step-1000000"]
    # The run was continued from step 40.
    save(tmp_path, tensors(8), Content(300), keep=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000040", "step-000300"]
    assert_is(tmp_path / "step-000300", tensors(8), step=300)


def test_a_run_or_a_checkpoint_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older, newer = (save(tmp_path / "run" / "checkpoints", tensors(step), Content(step)) for step in (99, 100))
    assert find_checkpoint(str(tmp_path / "run")) == (newer, Content(100))
    assert find_checkpoint(str(older)) == (older, Content(99))
    assert run_of(str(older)) == run_of(str(tmp_path / "run")) == tmp_path / "run"
    assert run_of(str(tmp_path / "copy" / "step-000099")) is None
    monkeypatch.chdir(older)
    assert run_of("../step-000100") == tmp_path / "run"


# The first limit is below the size of the tensors' file, the second below the size of the manifest.
@pytest.mark.parametrize("size", [100, 900])
def test_a_write_that_fails_half_way_keeps_the_one_before_and_says_so(tmp_path: Path, size: int) -> None:
    before = save(tmp_path, tensors(5), Content(5))
    text = rf"^cannot write the checkpoint {tmp_path}/step-000006: .*File too large.*; earlier checkpoints are intact: "
    with files_of_at_most(size), pytest.raises(OSError, match=text):
        save(tmp_path, tensors(6), Content(6, curve=[[0.5] * 300]))
    assert_is(before, tensors(5), step=5)
    assert list(tmp_path.iterdir()) == [before]


_KILLED = """
import os, signal, sys, torch
from pathlib import Path
from fuselayers.cli.train.checkpoint import Content, save
folder, function, number = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
calls, real = [], getattr(os, function)
def killed(*arguments):
    calls.append(arguments)
    if len(calls) == number:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*arguments)
setattr(os, function, killed)
save(folder, {"model.weight": torch.full((3, 4), 6.0)}, Content(6))
print("saved")
"""


# In order: the tensors are flushed; the manifest, its folder, the folder again; all is renamed; the oldest is renamed.
# The last run went back to step 4: the first rename takes step 6 away, the second would put the new one in its place.
@pytest.mark.parametrize(
    ("newest", "moment", "step"),
    [
        *((5, moment, 5) for moment in ("fsync 1", "fsync 2", "fsync 4", "rename 1")),
        *((5, moment, 6) for moment in ("rename 2", "fsync 5")),
        (6, "rename 2", 4),
    ],
)
def test_a_kill_in_the_middle_of_a_write_leaves_whole_ones(tmp_path: Path, newest: int, moment: str, step: int) -> None:
    folder = tmp_path / "checkpoints"
    for number in (4, newest):
        save(folder, tensors(number), Content(number))
    function, _, call = moment.partition(" ")
    assert run_program(_KILLED, str(folder), function, call).code == -signal.SIGKILL
    path, _ = find_checkpoint(str(tmp_path))
    assert_is(path, {"model.weight": torch.full((3, 4), 6.0)} if step == 6 else tensors(step), step=step)


def test_a_flipped_bit_is_found_or_changes_nothing(tmp_path: Path) -> None:
    path = save(tmp_path, tensors(), Content(5))
    whole = {file: file.read_bytes() for file in path.iterdir()}
    num_found = 0
    for seed in range(200):
        chance = random.Random(seed)
        file = chance.choice(sorted(whole))
        damaged = bytearray(whole[file])
        damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
        file.write_bytes(damaged)
        said = ""
        try:
            assert_is(path, tensors(), step=5)
        except ValueError as error:
            said = str(error)
            num_found += 1
        assert not said or said.endswith(f"or is damaged: the checksum of {file.name} is wrong")
        file.write_bytes(whole[file])
    # The other bits are in the space between the entries of the manifest.
    assert num_found > 180


def _rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest and give it the right checksum, as an attacker would."""
    content = json.loads((path / "manifest.json").read_bytes())
    del content["sha256"]
    change(content)
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(content | {"sha256": digest}))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda manifest: manifest.update(format="other"),
            "is of format 'other', not fuselayers.checkpoint 5; use the",
        ),
        (lambda manifest: manifest.pop("curve"), None),
        (lambda manifest: manifest.update(more=1), "or is damaged: the checksum of manifest.json is wrong"),
        (lambda manifest: manifest.update(files={"../x": "1"}), "the checksum of ../x is wrong"),
    ],
)
def test_wrong_contents_are_named(tmp_path: Path, change: Callable[[dict[str, Any]], object], text: str | None) -> None:
    path = save(tmp_path, tensors(), Content(5))
    _rewrite(path, change)
    if text is None:  # a missing text is read as empty
        assert read_checkpoint(path) == Content(5)
        return
    with pytest.raises(ValueError, match=re.escape(text)):
        read_checkpoint(path)


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b"[" * 100_000, b'{"step": ' + b"1" * 5000 + b"}", b"\xff"])
def test_a_manifest_that_is_none_is_named(tmp_path: Path, body: bytes) -> None:
    path = save(tmp_path, tensors(), Content(5))
    (path / "manifest.json").write_bytes(body)
    with pytest.raises(ValueError, match=r"or is damaged: the checksum of manifest\.json is wrong$"):
        read_checkpoint(path)


def test_reading_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path, tensors(), Content(5))
    # torch's default storage would read this file.
    (path / ".metadata").write_bytes(pickle.dumps(os.getcwd))

    def refused(*arguments: object, **named: object) -> None:
        raise AssertionError("a pickle is read")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, refused)
    assert_is(path, tensors(), step=5)
