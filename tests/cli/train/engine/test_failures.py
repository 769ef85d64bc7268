"""A process that fails ends all others, with one message, soon."""

import time
from pathlib import Path

import pytest
import torch

from .torchrun import curve, overrides, torchrun, written_text

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed")

# As `--import`: rank 1 fails in the middle of its third step, the other one waits for its gradient.
_FAILS = """
import os, signal
from fuselayers.cli.train.loop import Trainer

trained, losses = Trainer.step, Trainer.loss
steps = 0

def step(trainer, number):
    global steps
    steps = number
    return trained(trainer, number)

def loss(trainer, *batch):
    value = losses(trainer, *batch)
    if os.environ["RANK"] == "1" and steps == 3:
        {failure}
    return value

Trainer.step, Trainer.loss = step, loss
"""


def _ended(failure: str, folder: Path) -> str:
    (folder / "failing.py").write_text(_FAILS.format(failure=failure))
    asked = [*overrides(written_text(folder)), "parallel=fsdp", f"train.output={folder / 'run'}"]
    started = time.monotonic()
    ended = torchrun(2, "-m", "fuselayers", "train", *asked, "--import", "failing", folder=folder)
    assert time.monotonic() - started < 200, "a process waited for the failed one"
    assert ended.returncode == 1, ended.stderr  # torchrun's own code
    assert len(curve(folder / "run")) == 2
    return ended.stderr


def _complaints(errors: str) -> list[str]:
    return [line for line in errors.splitlines() if line.startswith("fuselayers, rank ")]


@pytest.mark.slow
def test_an_error_on_one_rank_ends_all_with_one_message(tmp_path: Path) -> None:
    errors = _ended('raise OSError("the disk is full")', tmp_path)
    assert _complaints(errors) == ["fuselayers, rank 1: the disk is full"]
    # torchrun's own report has a traceback, of torchrun.
    assert "exitcode  : 2" in errors
    assert "fuselayers/cli" not in errors


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_all_with_one_message(tmp_path: Path) -> None:
    errors = _ended("os.kill(os.getpid(), signal.SIGKILL)", tmp_path)
    (line,) = _complaints(errors)
    assert line.startswith("fuselayers, rank 0: lost another process of this run, which was killed or whose machine")
    assert "exitcode  : -9" in errors


@pytest.mark.slow
def test_a_traceback_says_of_which_rank_it_is(tmp_path: Path) -> None:
    errors = _ended('raise LookupError("a bug")', tmp_path)
    assert _complaints(errors) == ["fuselayers, rank 1: LookupError, with the traceback that follows"]
    assert errors.count("LookupError: a bug") == 1
    assert "exitcode  : 1" in errors


@pytest.mark.slow
def test_a_folder_that_holds_a_run_is_refused_once(tmp_path: Path) -> None:
    asked = [*overrides(written_text(tmp_path)), "parallel=ddp", f"train.output={tmp_path / 'run'}"]
    first = torchrun(2, "-m", "fuselayers", "train", *asked, folder=tmp_path)
    assert first.returncode == 0, first.stderr
    second = torchrun(2, "-m", "fuselayers", "train", *asked, folder=tmp_path)
    (line,) = _complaints(second.stderr)
    assert "already holds a run" in line
