import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from fuselayers.cli.train.checkpoint import (
    Checkpoint,
    load_weights,
    random_state,
    read_checkpoint,
    write_checkpoint,
)
from tests.processes import run


def _checkpoint(step: int = 5, *, width: int = 3) -> Checkpoint:
    model = nn.Linear(width, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, width)).sum().backward()
    optimizer.step()
    return Checkpoint(step, "train: {}\n", "abc", model.state_dict(), optimizer.state_dict(), random_state())


def _assert_equal(got: Checkpoint, wanted: Checkpoint) -> None:
    assert (got.step, got.config_yaml, got.text_fingerprint) == (wanted.step, wanted.config_yaml, "abc")
    assert got.model.keys() == wanted.model.keys()
    for name, tensor in wanted.model.items():
        assert torch.equal(got.model[name], tensor)
    assert got.optimizer["param_groups"] == wanted.optimizer["param_groups"]
    for index, state in wanted.optimizer["state"].items():
        for name, tensor in state.items():
            assert torch.equal(got.optimizer["state"][index][name], tensor)
    assert torch.equal(got.random_state["cpu"], wanted.random_state["cpu"])


@contextmanager
def _files_of_at_most(size: int) -> Iterator[None]:
    """A limit of the kernel on the size of files: writes fail half-way, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_write_that_fails_half_way_keeps_the_one_before_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    wanted = _checkpoint(5)
    with _files_of_at_most(2000), pytest.raises(OSError, match="there was none before; make room and train again"):
        write_checkpoint(path, wanted)
    assert list(tmp_path.iterdir()) == []
    write_checkpoint(path, wanted)
    text = rf"cannot write {path}: File too large \(checkpoint of step 6\); the checkpoint before it \(step 5\) is"
    with _files_of_at_most(2000), pytest.raises(OSError, match=text):
        write_checkpoint(path, _checkpoint(6))
    _assert_equal(read_checkpoint(path), wanted)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("moment", ["os.fsync", "os.replace"])
def test_a_kill_in_the_middle_of_a_write_keeps_the_one_before(tmp_path: Path, moment: str) -> None:
    path = tmp_path / "checkpoint.pt"
    wanted = _checkpoint(5)
    write_checkpoint(path, wanted)
    script = (
        "import os, signal, sys\nfrom dataclasses import replace\nfrom pathlib import Path\n"
        "from fuselayers.cli.train.checkpoint import read_checkpoint, write_checkpoint\n"
        f"{moment} = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)\n"
        "path = Path(sys.argv[1])\n"
        "write_checkpoint(path, replace(read_checkpoint(path), step=6))\n"
    )
    assert run(script, str(path)).code == -signal.SIGKILL
    _assert_equal(read_checkpoint(path), wanted)
    write_checkpoint(path, replace(wanted, step=6))
    assert read_checkpoint(path).step == 6
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    with pytest.raises(FileNotFoundError, match=r"no checkpoint .*; train\.resume= takes a checkpoint or the folder"):
        read_checkpoint(path)
    write_checkpoint(path, _checkpoint())
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], b"text", b""):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="is not a checkpoint of fuselayers, or a damaged one"):
            read_checkpoint(path)
    for other in ({"model": {}}, [1, 2]):
        torch.save(other, path)
        with pytest.raises(ValueError, match="is not a checkpoint of fuselayers: it was written by something else"):
            read_checkpoint(path)
    torch.save({"format": "fuselayers.checkpoint", "version": 99}, path)
    with pytest.raises(ValueError, match="has version 99 of the checkpoint format, this fuselayers reads version 1"):
        read_checkpoint(path)


class _Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def test_a_strangers_checkpoint_runs_no_code(tmp_path: Path) -> None:
    torch.save({"format": "fuselayers.checkpoint", "version": 1, "step": _Hostile(tmp_path / "ran")}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match="is not a checkpoint of fuselayers"):
        read_checkpoint(tmp_path / "a.pt")
    assert not (tmp_path / "ran").exists()


def test_weights_of_another_architecture_are_refused_and_change_nothing() -> None:
    model = nn.Linear(4, 2, bias=False)
    before = model.weight.clone()
    text = (
        r"the checkpoint a\.pt is of another architecture: it has bias, which the model does not; "
        r"weight is \[2, 3\] there and \[2, 4\] in the model; resume with the model"
    )
    with pytest.raises(ValueError, match=text):
        load_weights(model, _checkpoint(), path=Path("a.pt"))
    assert torch.equal(model.weight, before)
    with pytest.raises(ValueError, match=r"it lacks 0\.weight; it lacks 0\.bias; it has weight, .* \(and 1 more\)"):
        load_weights(nn.Sequential(nn.Linear(3, 2)), _checkpoint(), path=Path("a.pt"))
