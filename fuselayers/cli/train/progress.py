"""Progress of a training: a bar in a terminal, else lines."""

import statistics
import time
from collections import deque
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from .metrics import Metrics

_PLAIN_LINES = 20
_SPEED_WINDOW = 50


class TrainingProgress:
    """Shows loss, tokens per second and the time left.

    Args:
        console: a terminal that can move its cursor gets the bar, everything else lines.
        steps: of the whole run.
        done: steps of earlier sessions.
    """

    def __init__(self, console: Console, *, steps: int, done: int = 0) -> None:
        self.console = console
        self._steps = steps
        self._done = done
        # The first step compiles; the median of the last ones ignores it.
        self._durations: deque[float] = deque(maxlen=_SPEED_WINDOW)
        self._validation_loss: float | None = None
        self._started = time.perf_counter()
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            self._bar = Progress(
                BarColumn(bar_width=30),
                MofNCompleteColumn(),
                TextColumn("{task.description}"),
                TimeElapsedColumn(),
                console=console,
            )
            self._task = self._bar.add_task("the first step", total=steps, completed=done)

    def __enter__(self) -> "TrainingProgress":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, row: Metrics) -> None:
        """Show a finished step."""
        now = time.perf_counter()
        self._durations.append(now - self._started)
        self._started = now
        left = statistics.median(self._durations) * (self._steps - row.step)
        if row.validation_loss is not None:
            self._validation_loss = row.validation_loss
        if self._bar is not None and self._task is not None:
            text = describe(row, validation_loss=self._validation_loss, seconds_left=left)
            self._bar.update(self._task, completed=row.step, description=text)
        elif row.validation_loss is not None or row.step % max(1, self._steps // _PLAIN_LINES) == 0:
            text = describe(row, validation_loss=row.validation_loss, seconds_left=left)
            self.console.print(f"step {row.step}/{self._steps}  {text}", highlight=False, soft_wrap=True)

    def note(self, text: str) -> None:
        """Print a line without breaking the bar."""
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)


def describe(row: Metrics, *, validation_loss: float | None, seconds_left: float) -> str:
    """One line about a step.

    >>> row = Metrics(10, 2.5, None, 0.001, 1.0, 12345.6, 3.0)
    >>> describe(row, validation_loss=2.75, seconds_left=75)
    'loss 2.500  validation 2.750  12,346 tokens/s  1:15 left'
    """
    validation = "" if validation_loss is None else f"  validation {validation_loss:.3f}"
    minutes, seconds = divmod(round(seconds_left), 60)
    return f"loss {row.loss:.3f}{validation}  {row.tokens_per_second:,.0f} tokens/s  {minutes}:{seconds:02d} left"
