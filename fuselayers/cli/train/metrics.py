"""The run's curve as a CSV file: one row per step."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import TextIO

from ...regular_files import open_regular
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
        model_flops_utilisation: the share of the machine's peak FLOP/s that the model's own arithmetic took; None where
            it is not known.
        peak_memory_bytes: the most memory so far in this session.
    """

    step: int
    loss: float
    validation_loss: float | None
    learning_rate: float
    gradient_norm: float
    tokens_per_second: float
    seconds: float
    model_flops_utilisation: float | None
    peak_memory_bytes: int


_HEADER = ",".join(field.name for field in fields(Metrics)) + "\n"


class MetricsFile:
    """Appends rows to the curve of a run. Floats are written exactly.

    Args:
        path: the CSV file; created when it is missing. A curve that is already there is replaced.
        rows: what it begins with: those of a resumed run's checkpoint. A resumed run thereby writes the curve of an
            uninterrupted one, and a damaged file is repaired.

    Raises:
        OSError: the file cannot be written.
        ValueError: the file is no curve of a run.
    """

    def __init__(self, path: Path, *, rows: Sequence[Metrics] = ()) -> None:
        self.path = path
        self.rows = list(rows)
        if path.exists():
            _check_first_line(path)
        write_text(path, self.text())

    def text(self) -> str:
        """The content of the file, for the checkpoint."""
        return _HEADER + "".join(map(_line, self.rows))

    def append(self, row: Metrics) -> None:
        """Write one row. It survives a kill of this process, and after `sync` a power cut."""
        with self._open() as file:
            file.write(_line(row))
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
    """The complete rows of a metrics.csv; see `parse_metrics`."""
    return parse_metrics(path.read_text(encoding="utf-8"), source=str(path))


def parse_metrics(curve: str, *, source: str) -> list[Metrics]:
    """The complete rows of a curve.

    Args:
        curve: the content of a metrics.csv.
        source: where it is from, for the errors.

    Raises:
        ValueError: the first line is not a curve's, or a row cannot be read.

    >>> parse_metrics(_HEADER + "1,5.5,,0.001,1.0,1000.0,0.5,0.41,9000\\n", source="a test")[0].loss
    5.5
    """
    lines = curve.splitlines(keepends=True)
    if not lines or lines[0] != _HEADER:
        raise ValueError(f"{source} is not the curve of a run: its first line must be {_HEADER.strip()}")
    return [_parse(line, source=source) for line in lines[1:] if line.endswith("\n")]


def _check_first_line(path: Path) -> None:
    """Refuse to replace a table of the user's."""
    with open_regular(path) as file:
        first = file.readline(len(_HEADER))
    if first and first != _HEADER.encode():
        raise ValueError(
            f"{path} is not the curve of a run: its first line must be {_HEADER.strip()}; move the file away, the "
            "checkpoint holds the curve too"
        )


def _parse(line: str, *, source: str) -> Metrics:
    try:
        step, loss, validation_loss, rate, norm, speed, seconds, utilisation, memory = line.strip().split(",")
        return Metrics(
            step=int(step),
            loss=float(loss),
            validation_loss=float(validation_loss) if validation_loss else None,
            learning_rate=float(rate),
            gradient_norm=float(norm),
            tokens_per_second=float(speed),
            seconds=float(seconds),
            model_flops_utilisation=float(utilisation) if utilisation else None,
            peak_memory_bytes=int(memory),
        )
    except ValueError as error:
        raise ValueError(f"{source} is not the curve of a run: cannot read the row {line.strip():.80}") from error


def _line(row: Metrics) -> str:
    return ",".join("" if value is None else repr(value) for value in astuple(row)) + "\n"
