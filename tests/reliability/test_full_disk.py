"""A disk fills up in the middle of a run: one line says so, and the continued run equals the uninterrupted one."""

from __future__ import annotations

import random
import resource
import shutil
from pathlib import Path

import pytest

from tests.reliability.runs import assert_same_run, continue_or_begin, overrides, rows_of, start, wait_for
from tests.reliability.tally import Tally


@pytest.mark.slow
def test_a_run_on_a_full_disk(tally: Tally, whole: Path, tmp_path: Path) -> None:
    largest = max(path.stat().st_size for path in (whole / "run" / "checkpoints").rglob("*"))

    def check(random: random.Random) -> None:
        run = tmp_path / "run"
        shutil.rmtree(run, ignore_errors=True)
        program = start(*overrides(whole), f"train.output={run}")
        rows = random.randint(1, 30)
        wait_for(lambda: rows_of(run) >= rows, program)
        # No file may grow beyond this: writes fail half-way, as on a full disk. Errors still fit.
        size = random.randint(2000, largest - 1)
        resource.prlimit(program.pid, resource.RLIMIT_FSIZE, (size, size))
        ended = program.wait()
        assert ended.code == 2, (ended.code, ended.errors)
        assert ended.errors.count("\n") == 1, ended.errors
        assert "File too large" in ended.errors
        ended = continue_or_begin(run, overrides(whole))
        assert ended.code == 0, ended.errors
        assert_same_run(run, whole / "run")

    tally.seeds(check, few=1, all=40)
