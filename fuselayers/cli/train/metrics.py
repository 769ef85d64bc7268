"""The run's curve as a CSV file: one row per step."""

import csv
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import TextIO

from ..files import write_text

FILE_NAME = "metrics.csv"


@dataclass(frozen=True)
class Metrics:
    """One step of training.

    Args:
        step: 1 for the first.
        loss: nats per byte, the mean over the step's batch.
        validation_loss: nats per byte on the held-out text after the step; None when it was not measured.
        learning_rate: of the step.
        gradient_norm: before clipping.
        tokens_per_second: of this step.
        seconds: of training up to the end of this step, all sessions, with evaluation and checkpoints.
    """

    step: int
    loss: float
    validation_loss: float | None
    learning_rate: float
    gradient_norm: float
    tokens_per_second: float
    seconds: float


_HEADER = [field.name for field in fields(Metrics)]


class MetricsFile:
    """Appends rows to the curve of a run. Floats are written exactly.

    Args:
        path: the CSV file; created when it is missing.
        after_step: rows of later steps are deleted, and an incomplete last row, so that a resumed run writes the same
            curve as an uninterrupted one.

    Raises:
        OSError: the file cannot be written.
        ValueError: the file is no curve of a run.
    """

    def __init__(self, path: Path, *, after_step: int) -> None:
        self.path = path
        self.rows = [row for row in read_metrics(path) if row.step <= after_step] if path.exists() else []
        write_text(path, "".join([_line(_HEADER), *(_line(_cells(row)) for row in self.rows)]))

    def append(self, row: Metrics) -> None:
        """Write one row. It survives a kill of this process, and after `sync` a power cut."""
        with self._open() as file:
            file.write(_line(_cells(row)))
        self.rows.append(row)

    def sync(self) -> None:
        """Flush all rows to the disk, before a checkpoint counts their steps."""
        with self._open() as file:
            os.fsync(file.fileno())

    @contextmanager
    def _open(self) -> Iterator[TextIO]:
        try:
            with open(self.path, "a", encoding="utf-8", newline="") as file:
                yield file
        except OSError as error:
            raise OSError(
                f"cannot write {self.path}: {error.strerror}; the last checkpoint of the run is whole, and resuming "
                "from it mends the curve"
            ) from error


def read_metrics(path: Path) -> list[Metrics]:
    """The complete rows of a curve.

    Raises:
        ValueError: the file's first line is not a curve's.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "metrics.csv"
    >>> file = MetricsFile(path, after_step=0)
    >>> file.append(Metrics(1, 5.5, None, 0.001, 1.0, 1000.0, 0.5))
    >>> read_metrics(path)[0].loss
    5.5
    """
    with open(path, encoding="utf-8", newline="") as file:
        lines = file.readlines()
    if not lines or next(csv.reader(lines[:1])) != _HEADER:
        raise ValueError(f"{path} is not the curve of a run: its first line must be {','.join(_HEADER)}")
    whole = [line for line in lines[1:] if line.endswith("\n")]
    return [_parse(cells, path=path) for cells in csv.reader(whole)]


def _parse(cells: list[str], *, path: Path) -> Metrics:
    try:
        step, loss, validation_loss, *others = cells
        rate, norm, speed, seconds = map(float, others)
        measured = float(validation_loss) if validation_loss else None
        return Metrics(int(step), float(loss), measured, rate, norm, speed, seconds)
    except ValueError as error:
        raise ValueError(f"{path} is not the curve of a run: cannot read the row {','.join(cells)}") from error


def _cells(row: Metrics) -> list[str]:
    return ["" if value is None else repr(value) for value in astuple(row)]


def _line(cells: list[str]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(cells)
    return buffer.getvalue()
