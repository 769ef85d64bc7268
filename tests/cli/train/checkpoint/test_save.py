from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fuselayers.cli.train.checkpoint import Saver, Texts, newest, read_checkpoint, save, whole_tensors
from tests.processes import run as run_program


def tensors(step: int = 5, *, rows: int = 3) -> dict[str, Tensor]:
    """A state whose every number tells its step, in several dtypes and layouts, one of them empty."""
    return {
        "model.weight": torch.full((rows, 4), float(step)).t(),
        "model.half": torch.full((7,), step, dtype=torch.bfloat16),
        "model.empty": torch.empty(0, 3),
        "optimizer.weight.step": torch.tensor(float(step)),
        "model.count": torch.tensor([[step]], dtype=torch.int64),
        "model.flag": torch.tensor([True, False, True]),
    }


def assert_is(path: Path, wanted: dict[str, Tensor], *, step: int) -> None:
    """The checkpoint is whole, and holds these numbers."""
    checkpoint = read_checkpoint(path)
    assert checkpoint.step == step
    got = whole_tensors(path, checkpoint)
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor), name


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """A limit of the kernel on the size of files: writes fail half-way, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_what_is_saved_is_read(tmp_path: Path) -> None:
    texts = Texts(config_yaml="train: {}\n", text_fingerprint="abc", curve="step,loss\n1,é\n")
    path = save(tmp_path / "checkpoints", tensors(), step=5, texts=texts)
    assert path == tmp_path / "checkpoints" / "step-000005"
    assert_is(path, tensors(), step=5)
    assert read_checkpoint(path).texts == texts


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    for step in (5, 40, 300, 1_000_000):
        save(tmp_path, tensors(step), step=step, keep=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000040", "step-000300", "step-1000000"]
    assert newest(tmp_path) == tmp_path / "step-1000000"
    assert_is(tmp_path / "step-000040", tensors(40), step=40)


def test_a_run_that_went_back_replaces_the_later_ones(tmp_path: Path) -> None:
    for step in (4, 8, 12):
        save(tmp_path, tensors(step), step=step, keep=3)
    # The run was continued from step 4, and now takes another course.
    save(tmp_path, tensors(80), step=8, keep=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000004", "step-000008"]
    assert_is(tmp_path / "step-000008", tensors(80), step=8)


@pytest.mark.parametrize("size", [100, 1000])
def test_a_write_that_fails_half_way_keeps_the_one_before_and_says_so(tmp_path: Path, size: int) -> None:
    # The first limit is below the file of numbers, the second below the index.
    with files_of_at_most(size), pytest.raises(OSError, match="there was none before; make room and train again"):
        save(tmp_path, tensors(5), step=5)
    assert list(tmp_path.iterdir()) == []
    before = save(tmp_path, tensors(5), step=5)
    text = (
        rf"^cannot write the checkpoint {tmp_path}/step-000006: File too large; the one before it is whole: make room "
        rf"and continue with train\.resume={before}$"
    )
    with files_of_at_most(size), pytest.raises(OSError, match=text):
        save(tmp_path, tensors(6), step=6)
    assert_is(before, tensors(5), step=5)
    assert list(tmp_path.iterdir()) == [before]


@pytest.mark.parametrize("tensor", [torch.ones(2).to_sparse(), torch.ones(2, dtype=torch.complex128)])
def test_a_tensor_that_it_does_not_hold_is_named(tmp_path: Path, tensor: Tensor) -> None:
    text = rf"^a checkpoint holds dense tensors of float64, .*; model\.weight is {tensor.dtype}, {tensor.layout}$"
    with pytest.raises(TypeError, match=text):
        save(tmp_path, {"model.weight": tensor}, step=1)
    assert list(tmp_path.iterdir()) == []


def test_an_error_that_is_not_the_disks_stays_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, tensors(), step=1)
    assert list(tmp_path.iterdir()) == []


_KILLED = """
import os, signal, sys, torch
from pathlib import Path
from fuselayers.cli.train.checkpoint import save
folder, function, number = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
calls, real = [], getattr(os, function)
def killed(*arguments):
    calls.append(arguments)
    if len(calls) == number:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*arguments)
setattr(os, function, killed)
save(folder, {"model.weight": torch.full((3, 4), 6.0)}, step=6)
print("saved")
"""


@pytest.mark.parametrize(
    ("moment", "newest_step"),
    # In order: the file is flushed, the folder, the index, the folder; renamed; the oldest renamed; the folder flushed.
    [("fsync 1", 5), ("fsync 2", 5), ("fsync 3", 5), ("fsync 4", 5), ("rename 1", 5), ("rename 2", 6), ("fsync 5", 6)],
)
def test_a_kill_in_the_middle_of_a_write_leaves_whole_ones(tmp_path: Path, moment: str, newest_step: int) -> None:
    for step in (4, 5):
        save(tmp_path, tensors(step), step=step)
    function, _, call = moment.partition(" ")
    assert run_program(_KILLED, str(tmp_path), function, call).code == -signal.SIGKILL
    path = newest(tmp_path)
    assert path is not None
    assert path.name == f"step-{newest_step:06}"
    wanted = tensors(5) if newest_step == 5 else {"model.weight": torch.full((3, 4), 6.0)}
    assert_is(path, wanted, step=newest_step)
    # The next writer removes what is left, and writes.
    saver = Saver(tmp_path)
    assert not list(tmp_path.glob("*.part"))
    saver.save(tensors(7), step=7)
    assert_is(tmp_path / "step-000007", tensors(7), step=7)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_kill_between_the_renames_of_a_run_that_went_back_leaves_the_one_it_continued_from(tmp_path: Path) -> None:
    for step in (4, 6):
        save(tmp_path, tensors(step), step=step)
    # The first rename takes the later one away, the second would put the new one there.
    assert run_program(_KILLED, str(tmp_path), "rename", "2").code == -signal.SIGKILL
    assert newest(tmp_path) == tmp_path / "step-000004"
    assert_is(tmp_path / "step-000004", tensors(4), step=4)
