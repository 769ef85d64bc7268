"""One of the two processes of a training is killed: the run continues from its newest checkpoint, bit for bit."""

import random
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from os import kill
from pathlib import Path

import pytest
import torch

from fuselayers.cli.train.checkpoint import checkpoints_of, find_checkpoint, listed, whole_tensors
from tests.cli.train.conftest import curve
from tests.cli.train.engine.torchrun import ended, start
from tests.reliability.cases import Cases
from tests.reliability.runs import assert_same_run, overrides, rows_of

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed"),
    pytest.mark.slow,
    pytest.mark.timeout(1800),
]

_KILLS = 5
_STEPS = 60
_EVERY = 2
# For `--import`: each rank writes its process id.
_SAYS_ITS_NUMBER = """
import os
from pathlib import Path

written = Path(f"rank-{os.environ['RANK']}.part")
written.write_text(str(os.getpid()))
written.rename(written.with_suffix(".pid"))
"""


def test_ranks_killed_while_they_train(cases: Cases, tmp_path: Path) -> None:
    (tmp_path / "says_its_number.py").write_text(_SAYS_ITS_NUMBER)
    often = f"train.steps={_STEPS}", f"train.checkpoint_every={_EVERY}"
    asked = [*overrides(tmp_path), *often, "parallel.shard=fsdp"]
    whole = tmp_path / "whole"
    finished = ended(_start(tmp_path, *asked, f"train.output={whole}", f"train.keep_checkpoints={_STEPS}"))
    assert finished.returncode == 0, finished.stderr
    losses = curve(whole)

    def check(random: random.Random) -> None:
        run = tmp_path / "run"
        shutil.rmtree(run, ignore_errors=True)
        begin = [*asked, f"train.output={run}"]
        for _ in range(_KILLS):
            before = _step_of(run)
            program = _start(tmp_path, *([f"train.resume={run}"] if before else begin))
            victim, in_a_write = random.randrange(2), random.random() < 0.8
            _wait_for_a_write(run, program, count=random.randint(1, 3))
            # A write takes some 10 ms.
            time.sleep(random.random() * (0.01 if in_a_write else 0.2))
            with suppress(ProcessLookupError):
                kill(_process_of(victim, tmp_path), signal.SIGKILL)
            killed = ended(program)
            assert killed.returncode == 1, killed.stderr
            assert "exitcode  : -9" in killed.stderr, killed.stderr
            _assert_continues(killed.stdout, before)
            saved, rows = _step_of(run), rows_of(run)
            assert saved >= before, "a checkpoint was lost"
            # A row is written just before its checkpoint.
            assert saved >= (rows - 1) // _EVERY * _EVERY, "steps were lost"
            assert curve(run) == losses[:rows]
            if saved:
                _assert_same_tensors(run, whole)
        before = _step_of(run)
        assert before, "the kills came before the first checkpoint"
        last = ended(_start(tmp_path, f"train.resume={run}"))
        assert last.returncode == 0, last.stderr
        _assert_continues(last.stdout, before)
        assert_same_run(run, whole)

    cases.of_seeds(check, few=1, all=4)


def _start(folder: Path, *asked: str) -> subprocess.Popen[str]:
    for path in folder.glob("rank-*.pid"):
        path.unlink()
    return start(2, "-m", "fuselayers", "train", *asked, "--import", "says_its_number", folder=folder)


def _process_of(rank: int, folder: Path) -> int:
    return int((folder / f"rank-{rank}.pid").read_text())


def _wait_for_a_write(run: Path, program: subprocess.Popen[str], *, count: int) -> None:
    """Wait until a checkpoint is being written, the first or a later one of this session."""
    left = set(_temporary(run))
    seen: set[Path] = set()
    while len(seen) < count and program.poll() is None:
        seen |= {path for path in _temporary(run) if path not in left}
        time.sleep(0.0005)


def _temporary(run: Path) -> list[Path]:
    # A checkpoint that is being removed has such a name too, but it has a manifest.
    with suppress(FileNotFoundError):
        return [path for path in (run / "checkpoints").glob("*.part") if not (path / "manifest.json").exists()]
    return []


def _step_of(run: Path) -> int:
    return max((step for step, _ in listed(checkpoints_of(run))), default=0)


def _assert_continues(printed: str, step: int) -> None:
    assert (f"continuing after step {step}\n" in printed) == (step > 0), printed


def _assert_same_tensors(run: Path, whole: Path) -> None:
    """The newest checkpoint has the bits of the uninterrupted run at its step: no two steps are mixed."""
    path, _ = find_checkpoint(str(run))
    tensors, wanted = (whole_tensors(checkpoint) for checkpoint in (path, checkpoints_of(whole) / path.name))
    assert tensors.keys() == wanted.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, wanted[name]), f"{name} is of another step"
