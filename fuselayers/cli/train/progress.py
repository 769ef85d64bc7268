"""Progress of a training: some twenty lines, and in a terminal a bar below them."""

import statistics
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..text import say
from .metrics import Metrics

_LINES = 20
_SPEED_WINDOW = 50


class TrainingProgress:
    """Shows loss, tokens per second, the time left, and what is looked at less often.

    Args:
        console: where to.
        steps: of the whole run.
        done: steps of earlier sessions.
    """

    def __init__(self, console: Console, *, steps: int, done: int = 0) -> None:
        self.console = console
        self._steps = steps
        columns = (BarColumn(bar_width=30), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        in_a_terminal = console.is_terminal and not console.is_dumb_terminal
        self._bar = Progress(*columns, console=console, disable=not in_a_terminal)
        self._task = self._bar.add_task("the first step", total=steps, completed=done)

    def __enter__(self) -> "TrainingProgress":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def step(self, row: Metrics, durations: Sequence[float]) -> None:
        """Show a finished step, given the seconds of those of this session."""
        # The first step compiles; the median of the last ones ignores it.
        left = statistics.median(durations[-_SPEED_WINDOW:]) * (self._steps - row.step)
        self._bar.update(self._task, completed=row.step, description=f"loss {row.loss:.3f}  {_minutes(left)} left")
        if row.validation_loss is not None or row.step % max(1, self._steps // _LINES) == 0:
            first, second = describe(row, seconds_left=left)
            say(self.console, f"step {row.step}/{self._steps}  {first}", f"    {second}")


def describe(row: Metrics, *, seconds_left: float) -> tuple[str, str]:
    """A step in two lines of at most 80 columns, the first behind `step 10000/10000`.

    >>> row = Metrics(10, 2.5, 2.75, 0.001, 1.0, 12345.6, 3.0, 1_234_567_890)
    >>> print(*describe(row, seconds_left=75), sep="\\n")
    loss 2.500  validation 2.750  12,346 tokens/s  1:15 left
    peak memory 1.23 GB  gradient norm 1  learning rate 1.0e-03
    """
    validation = "" if row.validation_loss is None else f"  validation {row.validation_loss:.3f}"
    return (
        f"loss {row.loss:.3f}{validation}  {row.tokens_per_second:,.0f} tokens/s  {_minutes(seconds_left)} left",
        f"peak memory {row.peak_memory_bytes / 1e9:.2f} GB  gradient norm {row.gradient_norm:.3g}  "
        f"learning rate {row.learning_rate:.1e}",
    )


def _minutes(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
