"""Several processes want the same run at once: the first has it, the others are refused, and the run is unharmed."""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path

import pytest

from tests.reliability.runs import assert_same_run, has_checkpoint, overrides, rows_of, start, wait_for
from tests.reliability.tally import Tally


@pytest.mark.slow
def test_one_of_them_has_the_run(tally: Tally, whole: Path, tmp_path: Path) -> None:
    def check(random: random.Random) -> None:
        run = tmp_path / "run"
        shutil.rmtree(run, ignore_errors=True)
        first = start(*overrides(whole), f"train.output={run}")
        rows = random.randint(1, 30)
        wait_for(lambda: rows_of(run) >= rows and has_checkpoint(run), first)
        others = []
        for _ in range(random.randint(1, 2)):
            time.sleep(random.random() * 0.05)
            others.append(start(f"train.resume={run}"))
        ended = [program.wait() for program in others]
        assert first.wait().code == 0
        for end in ended:
            # It was refused, or it started after the end of the first process and had nothing left to do.
            if end.code != 0:
                assert end.code == 2, end.errors
                assert end.errors.count("\n") == 1, end.errors
                # The process with the lock may not have written its id yet.
                holders = ["another process", *(str(program.pid) for program in (first, *others))]
                assert any(holder in end.errors for holder in holders), end.errors
        assert_same_run(run, whole / "run")

    tally.seeds(check, few=1, all=30)
