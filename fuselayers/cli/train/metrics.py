"""The run's curve: a CSV file with a row per step, and some twenty lines on the screen."""

import os
import resource
import statistics
import sys
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Final

import torch
from rich.console import Console

from ..files import write_text
from ..text import say

FILE_NAME = "metrics.csv"
_LINES: Final = 20
_SPEED_WINDOW: Final = 50


@dataclass(frozen=True)
class Metrics:
    """One step of training.

    Args:
        step: 1 for the first.
        loss: nats per byte, the mean over the step's batch.
        validation_loss: nats per byte on the held-out text after the step; None when it was not measured.
        gradient_norm: before clipping.
        tokens_per_second: of this step.
        seconds: of training up to the end of this step, all sessions, with evaluation and checkpoints.
        peak_memory_bytes: the most memory so far in this session.
    """

    step: int
    loss: float
    validation_loss: float | None
    learning_rate: float
    gradient_norm: float
    tokens_per_second: float
    seconds: float
    peak_memory_bytes: int


HEADER = ",".join(field.name for field in fields(Metrics)) + "\n"


class MetricsFile:
    """Keeps the curve of a run, and appends its rows to a file. Floats are written exactly.

    Args:
        path: the CSV file, which is overwritten; None in the processes that write no files.
        rows: the first rows, from a resumed run's checkpoint. So a resumed run writes the curve of an uninterrupted
            one, and a damaged file is repaired.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path | None, *, rows: Sequence[Metrics] = ()) -> None:
        self.path = path
        self.rows = list(rows)
        if path is not None:
            write_text(path, HEADER + "".join(map(_line, self.rows)))

    def append(self, row: Metrics) -> None:
        """Write one row. It survives a kill of this process, and after `sync` a power cut."""
        self.rows.append(row)
        if self.path is None:
            return
        try:
            with open(self.path, "a", encoding="utf-8", newline="") as file:
                file.write(_line(row))
        except OSError as error:
            raise OSError(f"cannot write {self.path}: {error.strerror}; continue with train.resume=") from error

    def sync(self) -> None:
        """Flush all rows to the disk, before a checkpoint counts their steps."""
        if self.path is not None:
            with open(self.path, "a", encoding="utf-8") as file:
                os.fsync(file.fileno())


def _line(row: Metrics) -> str:
    return ",".join("" if value is None else repr(value) for value in astuple(row)) + "\n"


def show_progress(console: Console, row: Metrics, rows: Sequence[Metrics], *, steps: int, step_tokens: int) -> None:
    """Print a finished step, about twenty times in a run and after every validation.

    Args:
        rows: of this session, since a resumed run may be on another machine.
        steps: of the whole run.
        step_tokens: the tokens of a step.
    """
    if row.validation_loss is None and row.step % max(1, steps // _LINES):
        return
    validation = "" if row.validation_loss is None else f"  validation {row.validation_loss:.3f}"
    # The first step compiles; the median of the last ones ignores it.
    speed = statistics.median(row.tokens_per_second for row in rows[-_SPEED_WINDOW:])
    seconds_left = (steps - row.step) * step_tokens / speed
    minutes, seconds = divmod(round(seconds_left), 60)
    say(
        console,
        f"step {row.step}/{steps}  loss {row.loss:.3f}{validation}  {row.tokens_per_second:,.0f} tokens/s  "
        f"{row.peak_memory_bytes / 1e9:.2f} GB  {minutes}:{seconds:02d} left",
    )


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has had so far: tensors on a GPU, resident memory on a CPU, Python's too."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # bytes on a Mac, else kibibytes
