import io
import re

import pytest
from rich.console import Console

from fuselayers.cli.train.metrics import Metrics
from fuselayers.cli.train.progress import TrainingProgress, describe


def _show(*, terminal: bool) -> str:
    output = io.StringIO()
    with TrainingProgress(Console(file=output, force_terminal=terminal, width=120), steps=40, done=10) as progress:
        for step in range(11, 41):
            validation_loss = 3.25 if step == 33 else None
            progress.step(Metrics(step, 2.0 + step, validation_loss, 1e-3, 1.0, 1000.0, 1.0, 1_234_567_890), [9.0, 1.0])
    return output.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_some_twenty_lines_and_in_a_terminal_a_bar(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    output = _show(terminal=terminal)
    steps = [int(step) for step in re.findall(r"step (\d+)/40  loss ", output)]
    assert steps == [12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 33, 34, 36, 38, 40]
    assert "step 33/40  loss 35.000  validation 3.250  1,000 tokens/s  0:35 left" in output
    assert "    peak memory 1.23 GB  gradient norm 1  learning rate 1.0e-03" in output
    assert ("\x1b[" in output) == terminal
    assert ("\x1b[32m40/40" in output) == terminal


def test_the_lines_of_a_long_run_fit_80_columns() -> None:
    row = Metrics(99_999, 10.825, 10.825, 1e-3, 12.3456, 1_234_567.0, 1e6, 71_234_567_890)
    first, second = describe(row, seconds_left=5999)
    assert len(f"step 99999/99999  {first}") <= 80
    assert len(f"    {second}") <= 80
