"""The run's curve as a CSV file: one row per step."""

import os
import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any, Final

import torch

from ..files import write_text

FILE_NAME = "metrics.csv"


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
    """Appends rows to the curve of a run. Floats are written exactly.

    Args:
        path: the CSV file, which is written anew.
        rows: what it begins with: those of a resumed run's checkpoint. A resumed run thereby writes the curve of an
            uninterrupted one, and a damaged file is repaired.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, *, rows: Sequence[Metrics] = ()) -> None:
        self.path = path
        self.rows = list(rows)
        write_text(path, self.text())

    def text(self) -> str:
        """The content of the file, for the checkpoint."""
        return HEADER + "".join(map(_line, self.rows))

    def append(self, row: Metrics) -> None:
        """Write one row. It survives a kill of this process, and after `sync` a power cut."""
        try:
            with open(self.path, "a", encoding="utf-8", newline="") as file:
                file.write(_line(row))
        except OSError as error:
            raise OSError(f"cannot write {self.path}: {error.strerror}; continue with train.resume=") from error
        self.rows.append(row)

    def sync(self) -> None:
        """Flush all rows to the disk, before a checkpoint counts their steps."""
        with open(self.path, "a", encoding="utf-8") as file:
            os.fsync(file.fileno())


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

    >>> parse_metrics(HEADER + "1,5.5,,0.001,1.0,1000.0,0.5,9000\\n", source="a test")[0].loss
    5.5
    """
    header, *lines = curve.splitlines(keepends=True) or [""]
    if header != HEADER:
        raise ValueError(f"{source} is not the curve of a run: its first line must be {HEADER.strip()}")
    rows = []
    for line in lines:
        try:
            if line.endswith("\n"):
                cells = zip(_READERS, line.strip().split(","), strict=True)
                rows.append(Metrics(*(read(cell) for read, cell in cells)))
        except ValueError as error:
            raise ValueError(f"{source} is not the curve of a run: cannot read the row {line.strip():.80}") from error
    return rows


# How to read each column, in their order.
_READERS: Final[tuple[Callable[[str], Any], ...]] = (
    int,
    float,
    lambda cell: float(cell) if cell else None,
    *([float] * 4),
    int,
)


def _line(row: Metrics) -> str:
    return ",".join("" if value is None else repr(value) for value in astuple(row)) + "\n"


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has had so far: tensors on a GPU, resident memory on a CPU, Python's too.

    >>> peak_memory(torch.device("cpu")) > 10_000_000
    True
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # bytes on a Mac, else kibibytes
