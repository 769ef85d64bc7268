"""Progress of a training: a bar in a terminal, else lines."""

import statistics
import time
from collections import deque
from collections.abc import Iterable
from types import TracebackType

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TimeElapsedColumn
from rich.text import Text

from .metrics import Metrics

_PLAIN_LINES = 20
_SPEED_WINDOW = 50


class TrainingProgress:
    """Shows loss, tokens per second, the time left, and below them what is looked at less often.

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
        self._bar: _Bar | None = None
        self._task: TaskID | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            self._bar = _Bar(BarColumn(bar_width=30), MofNCompleteColumn(), TimeElapsedColumn(), console=console)
            self._task = self._bar.add_task("", total=steps, completed=done)

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
            self._bar.numbers = describe(row, validation_loss=self._validation_loss, seconds_left=left)
            self._bar.update(self._task, completed=row.step)
        elif row.validation_loss is not None or row.step % max(1, self._steps // _PLAIN_LINES) == 0:
            first, second = describe(row, validation_loss=row.validation_loss, seconds_left=left)
            text = f"step {row.step}/{self._steps}  {first}\n    {second}"
            self.console.print(text, highlight=False, soft_wrap=True)


class _Bar(Progress):
    """rich's bar, with lines of numbers below it."""

    numbers: tuple[str, ...] = ("the first step",)

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield from map(Text, self.numbers)


def describe(row: Metrics, *, validation_loss: float | None, seconds_left: float) -> tuple[str, str]:
    """A step in two lines of at most 80 columns, the first behind `step 10000/10000`.

    >>> row = Metrics(10, 2.5, None, 0.001, 1.0, 12345.6, 3.0, 0.412, 1_234_567_890)
    >>> print(*describe(row, validation_loss=2.75, seconds_left=75), sep="\\n")
    loss 2.500  validation 2.750  12,346 tokens/s  1:15 left
    MFU 41.2 %  peak memory 1.23 GB  gradient norm 1  learning rate 1.0e-03
    """
    validation = "" if validation_loss is None else f"  validation {validation_loss:.3f}"
    minutes, seconds = divmod(round(seconds_left), 60)
    first = f"loss {row.loss:.3f}{validation}  {row.tokens_per_second:,.0f} tokens/s  {minutes}:{seconds:02d} left"
    share = row.model_flops_utilisation
    return first, "  ".join(
        [
            *([f"MFU {100 * share:.1f} %"] if share is not None else []),
            f"peak memory {row.peak_memory_bytes / 1e9:.2f} GB",
            f"gradient norm {row.gradient_norm:.3g}",
            f"learning rate {row.learning_rate:.1e}",
        ]
    )
