"""A run that is killed at any moment and continued equals the uninterrupted run, bit for bit."""

import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.reliability.cases import Cases
from tests.reliability.runs import (
    STEPS,
    assert_same_run,
    continue_or_begin,
    has_checkpoint,
    overrides,
    rows_of,
    start,
    wait_for,
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run and its text."""
    folder = tmp_path_factory.mktemp("whole")
    assert start(*overrides(folder), f"train.output={folder / 'run'}").wait().code == 0
    return folder


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)],
    ids=lambda number: number.name,
)
def test_a_run_that_is_stopped_and_continued_is_the_uninterrupted_one(
    number: signal.Signals, cases: Cases, whole: Path, tmp_path: Path
) -> None:
    def check(random: random.Random) -> None:
        run = tmp_path / "run"
        shutil.rmtree(run, ignore_errors=True)
        asked = [*overrides(whole), f"train.output={run}"]
        for _ in range(random.randint(1, 3)):
            done = rows_of(run)
            if done > STEPS - 3:  # the previous signal came too late to leave a step
                break
            program = start(f"train.resume={run}") if has_checkpoint(run) else start(*asked)
            # Wait for the loop to begin: before that, every signal ends a process at once.
            rows = random.randint(done + 1, STEPS - 2)
            wait_for(lambda rows=rows: rows_of(run) >= rows, program)
            time.sleep(random.random() * 0.01)
            program.send(number)
            ended = program.wait()
            finished = ended.code == 0 and rows_of(run) == STEPS
            if number != signal.SIGKILL and ended.code != -number and not finished:
                assert ended.code == 0, ended.errors
                assert f"stopped after step {rows_of(run)}; to continue:\n  fuselayers train" in ended.printed
            if ended.code == -number and number != signal.SIGKILL:
                # The signal came after the last step, when the checkpoint is written and the loop is left.
                assert rows_of(run) == STEPS
        ended = continue_or_begin(run, overrides(whole))
        assert ended.code == 0, ended.errors
        assert_same_run(run, whole / "run")

    cases.of_seeds(check, few=1, all=25)
