"""`train.log=[tensorboard]`: a run's numbers as TensorBoard's event files, besides metrics.csv."""

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..text import complain
from .metrics import Metrics


def check_sinks(names: Sequence[str]) -> None:
    """Refuse a sink whose package is missing, before anything is written.

    Raises:
        ValueError: names the package and the command that installs it.
    """
    for name in names:
        try:
            # A folder of that name in the working directory, as TensorBoard makes, is an empty package without a file.
            if importlib.import_module(name).__file__ is None:
                raise ImportError(f"there is only a folder {name}")
        except ImportError as error:
            raise ValueError(
                f"train.log=[{name}] needs the package {name}, which cannot be imported: {error}; pip install {name}"
            ) from error


@contextmanager
def open_sinks(
    names: Sequence[str], folder: Path, *, config_yaml: str, rows: Sequence[Metrics]
) -> Iterator[Callable[[Metrics], None]]:
    """A function that takes each row of the curve; open it in one process of a run only.

    Event files that cannot be written are given up, and stderr says so. The run goes on, since metrics.csv has every
    row. `tensorboard --logdir runs` compares runs.

    Args:
        names: of `train.log`; without any, rows go nowhere else.
        folder: of the run; the files are in its folder `tensorboard`.
        config_yaml: the run's resolved config, shown under "text".
        rows: of the steps before this session.
    """
    if not names:
        yield lambda row: None
        return
    from torch.utils.tensorboard import SummaryWriter  # only here: it imports an optional package

    events = folder / "tensorboard"
    already_there = events.is_dir()
    # It hides the steps of an earlier session after its last checkpoint: this session takes them again.
    purge_step = rows[-1].step + 1 if rows else 1
    writer: Any = SummaryWriter(str(events), purge_step=purge_step)
    failed = False

    def attempt(write: Callable[[], None]) -> None:
        nonlocal failed
        if failed:
            return
        try:
            write()
        except Exception as error:
            failed = True
            complain(f"tensorboard takes no more numbers of this run: {error}; metrics.csv has them all")

    def log(row: Metrics) -> None:
        attempt(lambda: _write(writer, row))

    if not already_there:
        writer.add_text("config", "".join(f"    {line}\n" for line in config_yaml.splitlines()))
        for row in rows:
            log(row)
    try:
        yield log
    finally:
        attempt(writer.close)


def _write(writer: Any, row: Metrics) -> None:
    for name, value in asdict(row).items():
        if name != "step" and value is not None:
            writer.add_scalar(name, value, global_step=row.step)
