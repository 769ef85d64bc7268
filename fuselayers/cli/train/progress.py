"""Progress of a training: a line of numbers, some twenty times, and after every validation."""

import statistics
from collections.abc import Sequence
from typing import Final

from rich.console import Console

from ..text import say
from .metrics import Metrics

_LINES: Final = 20
_SPEED_WINDOW: Final = 50


def show_progress(console: Console, row: Metrics, *, steps: int, durations: Sequence[float]) -> None:
    """Print a finished step, if it is its turn.

    Args:
        steps: of the whole run.
        durations: seconds of the steps of this session.
    """
    if row.validation_loss is None and row.step % max(1, steps // _LINES):
        return
    # The first step compiles; the median of the last ones ignores it.
    seconds_left = statistics.median(durations[-_SPEED_WINDOW:]) * (steps - row.step)
    say(console, f"step {row.step}/{steps}  {described(row, seconds_left=seconds_left)}")


def described(row: Metrics, *, seconds_left: float) -> str:
    """A step in a line.

    >>> described(Metrics(10, 2.5, 2.75, 0.001, 1.0, 12345.6, 3.0, 1_234_567_890), seconds_left=75)
    'loss 2.500  validation 2.750  12,346 tokens/s  1.23 GB  1:15 left'
    """
    validation = "" if row.validation_loss is None else f"  validation {row.validation_loss:.3f}"
    minutes, seconds = divmod(round(seconds_left), 60)
    return (
        f"loss {row.loss:.3f}{validation}  {row.tokens_per_second:,.0f} tokens/s  {row.peak_memory_bytes / 1e9:.2f} GB"
        f"  {minutes}:{seconds:02d} left"
    )
