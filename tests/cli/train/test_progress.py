import io
import re

import pytest
from rich.console import Console

from fuselayers.cli.train.metrics import Metrics
from fuselayers.cli.train.progress import TrainingProgress


def _row(step: int, validation_loss: float | None = None) -> Metrics:
    return Metrics(step, 2.0 + step, validation_loss, 1e-3, 1.0, 1000.0, 1.0 * step)


def _show(*, terminal: bool) -> str:
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=120)
    with TrainingProgress(console, steps=40, done=10) as progress:
        for step in range(11, 41):
            progress.step(_row(step, validation_loss=3.25 if step == 33 else None))
        progress.note("a note with [brackets]")
    return output.getvalue()


def test_without_a_terminal_it_writes_lines() -> None:
    lines = _show(terminal=False).splitlines()
    steps = [int(found[1]) for line in lines if (found := re.match(r"step (\d+)/40  loss ", line))]
    assert steps == [12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 33, 34, 36, 38, 40]
    assert re.fullmatch(r"step 33/40  loss 35\.000  validation 3\.250  1,000 tokens/s  \d:\d\d left", lines[11])
    assert lines[-1] == "a note with [brackets]"
    assert "\x1b" not in "".join(lines)


def test_a_terminal_that_cannot_move_its_cursor_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    lines = _show(terminal=True).splitlines()
    assert sum("/40  loss " in line for line in lines) == 16


def test_on_a_terminal_it_draws_a_bar_with_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    output = _show(terminal=True)
    assert "40/40" in output
    assert "loss 42.000  validation 3.250  1,000 tokens/s" in output
    assert "\x1b[" in output
