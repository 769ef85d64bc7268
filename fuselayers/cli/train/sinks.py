"""`train.log=[tensorboard,wandb]`: where a run's numbers go besides metrics.csv.

A sink takes the rows of the curve. To add one, write a class like these two, and name it in `_SINKS` and in the
annotation of `TrainConfig.log`.
"""

import importlib
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, Protocol

from ...configs.values import parse_yaml
from ..files import write_text
from ..text import complain
from .metrics import Metrics


class Sink(Protocol):
    """Takes the rows of a curve."""

    def log(self, row: Metrics) -> None:
        """Take the row of a finished step."""

    def close(self) -> None:
        """Write what is not written yet."""


class TensorBoard:
    """Event files in the folder `tensorboard` of the run: `tensorboard --logdir runs` compares runs.

    Args:
        folder: of the run.
        config_yaml: the resolved config, shown under "text".
        rows: of the steps before this session.
    """

    def __init__(self, folder: Path, *, config_yaml: str, rows: Sequence[Metrics]) -> None:
        from torch.utils.tensorboard import SummaryWriter  # only here: it imports an optional package

        events = folder / "tensorboard"
        already_there = events.is_dir()
        # It hides the steps of an earlier session after its last checkpoint: this session takes them again.
        purge_step = rows[-1].step + 1 if rows else 1
        self._writer: Any = SummaryWriter(str(events), purge_step=purge_step)
        if not already_there:
            self._writer.add_text("config", "".join(f"    {line}\n" for line in config_yaml.splitlines()))
            for row in rows:
                self.log(row)

    def log(self, row: Metrics) -> None:
        """Take the row of a finished step."""
        for name, value in _numbers(row).items():
            self._writer.add_scalar(name, value, global_step=row.step)

    def close(self) -> None:
        """Write what is not written yet."""
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases; a resumed run continues it.

    Its own variables hold: WANDB_MODE=offline, WANDB_PROJECT (default fuselayers), WANDB_ENTITY.

    Args:
        folder: of the run; its name is the run's name, and W&B's files go there.
        config_yaml: the resolved config.
        rows: of the steps before this session.
    """

    def __init__(self, folder: Path, *, config_yaml: str, rows: Sequence[Metrics]) -> None:
        wandb = importlib.import_module("wandb")
        id_file = folder / "wandb" / "run_id.txt"
        already_there = id_file.is_file()
        if not already_there:
            id_file.parent.mkdir(exist_ok=True)
            write_text(id_file, uuid.uuid4().hex[:16])
        try:
            self._run: Any = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "fuselayers"),
                name=folder.name,
                # The same for every session in this folder, so that the curve goes on.
                id=id_file.read_text(encoding="utf-8").strip(),
                resume="allow",
                dir=str(folder),
                config=parse_yaml(config_yaml.encode(), "config.yaml"),
            )
        except Exception as error:
            raise ValueError(
                f"train.log=[wandb]: Weights & Biases cannot start: {error}; call `wandb login`, set "
                "WANDB_MODE=offline, or leave wandb out"
            ) from error
        # W&B drops a row whose step is not above its last one; a resumed run takes some steps again.
        self._run.define_metric("*", step_metric="step")
        if not already_there:
            for row in rows:
                self.log(row)

    def log(self, row: Metrics) -> None:
        """Take the row of a finished step."""
        self._run.log({"step": row.step, **_numbers(row)})

    def close(self) -> None:
        """Send what is not sent yet."""
        self._run.finish()


_SINKS: Final[dict[str, type[TensorBoard] | type[WeightsAndBiases]]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
}


def check_sinks(names: Iterable[str]) -> None:
    """Refuse a sink whose package is missing, before anything is written.

    Raises:
        ValueError: names the package and the command that installs it.
    """
    for name in names:
        try:
            # A folder of that name in the working directory, as both packages make, is an empty package without a file.
            if importlib.import_module(name).__file__ is None:
                raise ImportError(f"there is only a folder {name}")
        except ImportError as error:
            raise ValueError(
                f"train.log=[{name}] needs the package {name}, which cannot be imported: {error}; pip install {name}"
            ) from error


@contextmanager
def open_sinks(
    names: Iterable[str], folder: Path, *, config_yaml: str, rows: Sequence[Metrics]
) -> Iterator[Callable[[Metrics], None]]:
    """A function that gives a row to every sink; open them in one process of a run only.

    A sink that fails is dropped and named on stderr. The run goes on, since metrics.csv has every row.

    Args:
        names: of `train.log`.
        folder: of the run.
        config_yaml: the run's resolved config.
        rows: of the steps before this session.

    Raises:
        ValueError: a sink cannot be opened.
    """
    sinks: dict[str, Sink] = {}

    def drop(name: str, error: Exception) -> None:
        sinks.pop(name, None)
        complain(f"{name} takes no more numbers of this run: {error}; metrics.csv has them all")

    def log(row: Metrics) -> None:
        for name, sink in list(sinks.items()):
            try:
                sink.log(row)
            except Exception as error:
                drop(name, error)

    for name in names:
        sinks[name] = _SINKS[name](folder, config_yaml=config_yaml, rows=rows)
    try:
        yield log
    finally:
        for name, sink in list(sinks.items()):
            try:
                sink.close()
            except Exception as error:
                drop(name, error)


def _numbers(row: Metrics) -> dict[str, float]:
    return {name: value for name, value in asdict(row).items() if name != "step" and value is not None}
