"""One of two ranks is killed while they write a checkpoint: the newest one is whole, and the run continues from it."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fuselayers.cli.train.checkpoint import Saver, Texts, newest, read_checkpoint, state_of, whole_tensors
from tests.cli.train.checkpoint import sharded
from tests.reliability.tally import Tally

_KILLS = 4
_STEPS = 200
# A write takes some milliseconds. A power of two: vector instructions and the rest after them round differently, and
# the halves of a parameter must have such a rest where the whole has one.
_WIDTH = 256


def _train(run: str, steps: str, asynchronous: str) -> None:
    """Continue a run, with a checkpoint after each step; print each loss, and each step whose checkpoint is there."""
    model, optimizer = sharded.build("fsdp", width=_WIDTH)
    folder = Path(run)
    done = sharded.resume(model, optimizer, folder)
    with Saver(folder, asynchronous=asynchronous == "True") as saver:
        for step in range(done + 1, int(steps) + 1):
            loss = sharded.train(model, optimizer, step)
            print(step, loss.hex(), flush=True)
            saver.save(state_of(model, optimizer), step=step, texts=Texts(curve=str(step)))
            if asynchronous != "True":
                print("saved", step, flush=True)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    # As the ranks.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_ranks_killed_while_they_write(tally: Tally, tmp_path: Path) -> None:
    model, optimizer = sharded.build("single", width=_WIDTH)
    losses: dict[int, float] = {}
    states: dict[int, dict[str, torch.Tensor]] = {}

    def reach(last: int) -> None:
        """Train the uninterrupted run up to a step: one process has the bits of two that shard their parameters."""
        for step in range(len(losses) + 1, last + 1):
            losses[step] = sharded.train(model, optimizer, step)
            states[step] = {name: tensor.detach().clone() for name, tensor in state_of(model, optimizer).items()}

    def check(random: random.Random) -> None:
        run = tmp_path / "run"
        shutil.rmtree(run, ignore_errors=True)
        asynchronous = random.random() < 0.5
        for kill in range(_KILLS + 1):
            before = _step_of(run)
            steps = before + 2 if kill == _KILLS else _STEPS
            ranks = sharded.start(_train, run, steps, asynchronous, size=2, store=tmp_path / "store")
            if kill < _KILLS:
                # The write of some step, and a moment in it: the temporary folder is there from its begin to its end.
                writes_before = random.randint(0, 5)
                while _step_of(run) < before + writes_before and ranks[0].runs():
                    time.sleep(0.0002)
                while not _is_writing(run) and ranks[0].runs():
                    time.sleep(0.0002)
                time.sleep(random.random() * 0.02)
                victim = random.randrange(2)
                ranks[victim].send(signal.SIGKILL)
                time.sleep(random.random() * 0.02)
                ranks[1 - victim].send(signal.SIGKILL)
            ended = [one.wait() for one in ranks]
            if kill == _KILLS:
                assert all(one.printed.endswith("done\n") for one in ended), [one.errors for one in ended]
            else:
                assert ended[victim].code == -signal.SIGKILL, ended[victim].errors
                print(f"rank {victim} killed after step {_step_of(run)}, left: {_left(run)}")
            saved = _step_of(run)
            reach(saved + 2)
            lines = [line.split() for line in ended[0].printed.splitlines() if line[-1:].isalnum()]
            for words in lines:
                if words[0] == "saved":
                    assert int(words[1]) <= saved, "a checkpoint was lost"
                elif words[0].isdecimal():
                    reach(int(words[0]))
                    assert float.fromhex(words[1]) == losses[int(words[0])], words
            assert saved >= before, "a checkpoint was lost"
            if saved:
                path = newest(run)
                assert path is not None
                tensors = whole_tensors(path, read_checkpoint(path))
                assert tensors.keys() == states[saved].keys()
                assert all(torch.equal(tensor, states[saved][name]) for name, tensor in tensors.items()), (
                    "steps are mixed"
                )
        assert saved == before + 2
        assert {path.name for path in run.iterdir()} == {f"step-{saved - 1:06}", f"step-{saved:06}"}

    tally.seeds(check, few=1, all=6)


def _step_of(run: Path) -> int:
    path = newest(run)
    return 0 if path is None else int(path.name.removeprefix("step-"))


def _left(run: Path) -> str:
    """What the kill left of a write."""
    left = [sorted(file.name for file in path.iterdir()) for path in run.glob("*.part")]
    return ", ".join(f"[{' '.join(names)}]" for names in left) or "nothing"


def _is_writing(run: Path) -> bool:
    return run.is_dir() and any(path.suffix == ".part" for path in run.iterdir())
