import io
import re

import pytest
from rich.console import Console

from fuselayers.cli.train.metrics import Metrics
from fuselayers.cli.train.progress import TrainingProgress, describe


def _row(step: int, validation_loss: float | None = None) -> Metrics:
    return Metrics(step, 2.0 + step, validation_loss, 1e-3, 1.0, 1000.0, 1.0 * step, 0.4567, 1_234_567_890)


def _show(*, terminal: bool) -> str:
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=120)
    with TrainingProgress(console, steps=40, done=10) as progress:
        for step in range(11, 41):
            progress.step(_row(step, validation_loss=3.25 if step == 33 else None))
    return output.getvalue()


def test_without_a_terminal_it_writes_lines() -> None:
    lines = _show(terminal=False).splitlines()
    steps = [int(found[1]) for line in lines if (found := re.match(r"step (\d+)/40  loss ", line))]
    assert steps == [12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 33, 34, 36, 38, 40]
    first, second = lines[22:24]
    assert re.fullmatch(r"step 33/40  loss 35\.000  validation 3\.250  1,000 tokens/s  \d:\d\d left", first)
    assert second == "    MFU 45.7 %  peak memory 1.23 GB  gradient norm 1  learning rate 1.0e-03"
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
    assert "MFU 45.7 %  peak memory 1.23 GB  gradient norm 1  learning rate 1.0e-03" in output
    assert "\x1b[" in output


def test_the_lines_of_a_long_run_fit_80_columns() -> None:
    row = Metrics(99_999, 10.825, 10.825, 1e-3, 12.3456, 1_234_567.0, 1e6, 0.4567, 71_234_567_890)
    first, second = describe(row, validation_loss=10.825, seconds_left=5999)
    assert len(f"step 99999/99999  {first}") <= 80
    assert len(f"    {second}") <= 80


def test_what_is_not_known_is_left_out() -> None:
    row = Metrics(1, 2.0, None, 1e-3, 1.0, 1000.0, 1.0, None, 1_234_567_890)
    assert describe(row, validation_loss=None, seconds_left=0) == (
        "loss 2.000  1,000 tokens/s  0:00 left",
        "peak memory 1.23 GB  gradient norm 1  learning rate 1.0e-03",
    )
