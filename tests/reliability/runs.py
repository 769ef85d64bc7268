"""Runs of `fuselayers train` that take a second, and the comparison of two runs."""

import re
import time
from collections.abc import Callable
from pathlib import Path

from fuselayers.cli.train.checkpoint import checkpoints_of, listed
from tests.cli.conftest import tiny_on, write_text_file
from tests.cli.train import conftest
from tests.processes import Ended, Program

STEPS = 40
# One thread: tensors this small take longer with two, and the processes of a test share the cores.
_PROGRAM = """
import sys, torch
torch.set_num_threads(1)
from fuselayers.cli.main import main
raise SystemExit(main(sys.argv[1:]))
"""


def overrides(folder: Path) -> list[str]:
    """A run of `STEPS` steps, with a checkpoint after every fifth. Dropout makes the random numbers matter.

    Args:
        folder: the text is written here.
    """
    often = "train.evaluate_every=7", "train.evaluate_batches=1", "train.checkpoint_every=5"
    return [*tiny_on(write_text_file(folder)), "model.dropout=0.1", f"train.steps={STEPS}", *often]


def start(*arguments: str) -> Program:
    """Start `fuselayers train` with these overrides, in a process of its own."""
    return Program(_PROGRAM, "train", *arguments)


def continue_or_begin(run: Path, asked: list[str]) -> Ended:
    """Do what a user does after a lost run: continue from its checkpoint, or begin again if there is none."""
    if has_checkpoint(run):
        return start(f"train.resume={run}").wait()
    return start(*asked, f"train.output={run}").wait()


def has_checkpoint(run: Path) -> bool:
    """Whether the run can be continued."""
    return bool(listed(checkpoints_of(run)))


def rows_of(run: Path) -> int:
    """The number of whole lines below the header of the curve; 0 if there is no curve yet."""
    try:
        return max((run / "metrics.csv").read_bytes().count(b"\n") - 1, 0)
    except FileNotFoundError:
        return 0


def wait_for(condition: Callable[[], bool], program: Program) -> None:
    """Wait until the condition is met or the program has ended."""
    while not condition() and program.runs():
        time.sleep(0.0005)


def assert_same_run(run: Path, whole: Path) -> None:
    """Curve, weights and optimizer have the same bits, and nothing temporary is left."""
    conftest.assert_same_run(run, whole)
    assert {path.name for path in run.iterdir()} <= {path.name for path in whole.iterdir()}
    # The older checkpoint may be of a step at which a signal came.
    kept = [path.name for path in (run / "checkpoints").iterdir()]
    assert len(kept) == 2, kept
    assert all(re.fullmatch(r"step-\d{6}", name) for name in kept), kept
