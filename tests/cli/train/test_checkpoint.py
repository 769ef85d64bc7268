import math
import os
import random
import re
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuselayers.cli.train.checkpoint import (
    Checkpoint,
    find_checkpoint,
    load_optimizer,
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
    return Checkpoint(step, "train: {}\n", "abc", "", model.state_dict(), optimizer.state_dict(), random_state())


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


@pytest.mark.parametrize("moment", ["fsync", "replace 1", "replace 2"])
def test_a_kill_in_the_middle_of_a_write_keeps_the_one_before(tmp_path: Path, moment: str) -> None:
    path = tmp_path / "checkpoint.pt"
    wanted = _checkpoint(5)
    write_checkpoint(path, replace(wanted, step=4))
    write_checkpoint(path, wanted)
    function, _, call = moment.partition(" ")
    script = f"""
import os, signal, sys
from dataclasses import replace
from pathlib import Path
from fuselayers.cli.train.checkpoint import read_checkpoint, write_checkpoint
calls, real = [], os.{function}
def killed(*arguments):
    calls.append(arguments)
    if len(calls) == {call or 1}:
        os.kill(os.getpid(), signal.SIGKILL)
    real(*arguments)
os.{function} = killed
path = Path(sys.argv[1])
write_checkpoint(path, replace(read_checkpoint(path), step=6))
"""
    assert run(script, str(path)).code == -signal.SIGKILL
    _assert_equal(read_checkpoint(find_checkpoint(str(tmp_path))), wanted)
    write_checkpoint(path, replace(wanted, step=6))
    assert read_checkpoint(find_checkpoint(str(tmp_path))).step == 6
    _assert_equal(read_checkpoint(tmp_path / "checkpoint.previous.pt"), wanted)


def test_the_last_two_are_kept_and_the_newest_is_found(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    for step in (4, 5, 6):
        write_checkpoint(path, _checkpoint(step))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["checkpoint.previous.pt", "checkpoint.pt"]
    assert find_checkpoint(str(tmp_path)) == path
    assert [read_checkpoint(file).step for file in (path, tmp_path / "checkpoint.previous.pt")] == [6, 5]


@pytest.mark.parametrize("damage", ["flipped", "missing"])
def test_beside_a_damaged_one_the_other_is_offered(tmp_path: Path, damage: str) -> None:
    newest, previous = tmp_path / "checkpoint.pt", tmp_path / "checkpoint.previous.pt"
    write_checkpoint(newest, _checkpoint(5))
    write_checkpoint(newest, _checkpoint(6))
    for path, other, step in ((newest, previous, 5), (previous, newest, 6)):
        content = path.read_bytes()
        if damage == "missing":
            path.unlink()
        else:
            path.write_bytes(content[:3000] + bytes([content[3000] ^ 1]) + content[3001:])
        text = rf"{path}.*; {other.name} beside it is whole \(step {step}\): train\.resume={other}$"
        with pytest.raises((ValueError, FileNotFoundError), match=text):
            read_checkpoint(path)
        path.write_bytes(content)


def test_a_flipped_bit_is_found_or_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    wanted = _checkpoint()
    write_checkpoint(path, wanted)
    content = path.read_bytes()
    offsets = random.Random(0).sample(range(len(content)), 200)
    found = 0
    for offset in offsets:
        damaged = bytearray(content)
        damaged[offset] ^= 1 << offset % 8
        path.write_bytes(damaged)
        try:
            _assert_equal(read_checkpoint(path), wanted)
        except ValueError as error:
            assert "is not a checkpoint of fuselayers, or a damaged one" in str(error)  # noqa: PT017 (or it is whole)
            found += 1
    # The rest is padding, and numbers that no reader needs.
    assert found > 100


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"version": None}, "has version None of the checkpoint format, this fuselayers reads version 2; use the"),
        ({"version": torch.ones(2)}, "has version tensor([1., 1.]) of the checkpoint format, this fuselayers reads"),
        ({"step": -3}, "cannot be continued: its step must be an int of at least 0, got -3"),
        ({"step": 2.5}, "cannot be continued: its step must be an int of at least 0, got 2.5"),
        ({"optimizer": None}, "cannot be continued: its optimizer must be a mapping"),
        ({"config_yaml": 3}, "cannot be continued: its config_yaml must be a text"),
        ({"model": None}, "cannot be continued: its model must be a mapping of names to tensors"),
        ({"model": {"weight": [1.0]}}, "cannot be continued: its model must be a mapping of names to tensors"),
        ({"random_state": None}, "cannot be continued: its random_state must be a mapping of names to tensors"),
        ({"x" * 10_000: 1}, "cannot be continued: it has an unknown 'xxxxx"),
    ],
)
def test_wrong_contents_are_named(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    path = tmp_path / "a.pt"
    content = {"format": "fuselayers.checkpoint", "version": 2, **vars(_checkpoint())}
    torch.save(content | change, path)
    with pytest.raises(ValueError, match=re.escape(text)) as caught:
        read_checkpoint(path)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("name", "text"), [("version", "has version 'none' of the"), ("step", "it lacks step"), ("model", "it lacks model")]
)
def test_contents_that_are_missing_are_named(tmp_path: Path, name: str, text: str) -> None:
    content = {"format": "fuselayers.checkpoint", "version": 2, **vars(_checkpoint())}
    del content[name]
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=text):
        read_checkpoint(tmp_path / "a.pt")


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
    with pytest.raises(ValueError, match="has version 99 of the checkpoint format, this fuselayers reads version 2"):
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


def test_weights_of_another_dtype_or_without_a_number_are_refused() -> None:
    checkpoint = _checkpoint()
    model = nn.Linear(3, 2, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"weight is torch\.float32 there and torch\.float64 in the model; bias is"):
        load_weights(model, checkpoint, path=Path("a.pt"))
    empty = replace(checkpoint, model={**checkpoint.model, "weight": checkpoint.model["weight"].to("meta")})
    with pytest.raises(ValueError, match=r"weight is torch\.float32 on meta there and torch\.float32 in the model"):
        load_weights(nn.Linear(3, 2), empty, path=Path("a.pt"))
    sparse = replace(checkpoint, model={**checkpoint.model, "weight": checkpoint.model["weight"].to_sparse()})
    with pytest.raises(ValueError, match=r"weight is torch\.float32 torch\.sparse_coo there and torch\.float32 in the"):
        load_weights(nn.Linear(3, 2), sparse, path=Path("a.pt"))
    for value in (math.nan, -math.inf):
        checkpoint.model["bias"][1] = value
        with pytest.raises(ValueError, match=r"a\.pt cannot be continued: its bias holds a NaN or an infinity"):
            load_weights(nn.Linear(3, 2), checkpoint, path=Path("a.pt"))


@pytest.mark.parametrize(
    "change",
    [
        {"exp_avg": torch.full((2, 3), math.inf)},
        {"exp_avg": torch.zeros(2, 3, device="meta")},
        {"exp_avg_sq": -torch.ones(2, 3)},
        {"exp_avg_sq": torch.full((2, 3), math.nan)},
        {"step": torch.tensor(math.inf)},
        {"step": torch.tensor(1j)},
        {"step": torch.zeros((), device="meta")},
        {},
    ],
)
def test_an_optimizer_state_that_is_wrong_or_missing_is_refused(change: dict[str, Tensor]) -> None:
    checkpoint = _checkpoint(5)
    optimizer = torch.optim.AdamW(nn.Linear(3, 2).parameters())
    load_optimizer(optimizer, checkpoint, path=Path("a.pt"))
    state = dict(checkpoint.optimizer["state"])
    wrong = {0: state[0] | change, 1: state[1]} if change else {}
    changed = replace(checkpoint, optimizer=checkpoint.optimizer | {"state": wrong})
    text = (
        r"a\.pt cannot be continued: its optimizer must hold AdamW's state of 2 parameters, in their shapes and finite"
    )
    with pytest.raises(ValueError, match=text):
        load_optimizer(optimizer, changed, path=Path("a.pt"))


def test_a_parameter_that_is_never_used_has_no_optimizer_state() -> None:
    checkpoint = _checkpoint(5)
    used = {0: checkpoint.optimizer["state"][0]}
    optimizer = torch.optim.AdamW(nn.Linear(3, 2).parameters())
    checkpoint = replace(checkpoint, optimizer=checkpoint.optimizer | {"state": used})
    load_optimizer(optimizer, checkpoint, path=Path("a.pt"))
    assert set(optimizer.state_dict()["state"]) == {0}


def test_at_step_0_the_optimizer_has_no_state() -> None:
    optimizer = torch.optim.AdamW(nn.Linear(3, 2).parameters())
    load_optimizer(optimizer, replace(_checkpoint(0), optimizer={"state": {}}), path=Path("a.pt"))
    assert optimizer.state_dict()["state"] == {}
