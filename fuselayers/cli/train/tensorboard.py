"""`train.log=[tensorboard]`: a run's numbers as TensorBoard's event files, besides metrics.csv."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from .metrics import Metrics


@contextmanager
def event_files(folder: Path, *, done: int) -> Iterator[Callable[[Metrics], None]]:
    """Yield a function that writes a row of the curve; open it in one process of a run only.

    Args:
        done: steps of earlier sessions. TensorBoard hides existing events of later steps: this session repeats them.

    Raises:
        ValueError: TensorBoard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter  # only here: it imports an optional package
    except ImportError as error:
        raise ValueError(
            f"train.log=[tensorboard] needs the package tensorboard, which cannot be imported: {error}; "
            "pip install tensorboard"
        ) from error

    def log(row: Metrics) -> None:
        for name, value in asdict(row).items():
            if name != "step" and value is not None:
                writer.add_scalar(name, value, global_step=row.step)

    with SummaryWriter(str(folder), purge_step=done + 1) as writer:
        yield log
