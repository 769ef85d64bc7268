"""A finished run, and a run that was killed and resumed. Both are made once: tests read them, or change a copy."""

import csv
import io
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from rich.console import Console

from fuselayers.cli.train import train
from fuselayers.cli.train.checkpoint import checkpoints_of, listed, read_checkpoint, whole_tensors
from fuselayers.cli.train.loop import Trainer, Update
from fuselayers.cli.train.metrics import Metrics
from tests.cli.conftest import tiny_on, write_text_file


def run_train(overrides: list[str], *, code: int = 0, imports: Sequence[str] = ()) -> str:
    """Train, and return the output. The exit code must be `code`."""
    output = io.StringIO()
    assert train(overrides, console=Console(file=output, width=200), imports=imports) == code
    return output.getvalue()


def read_metrics(folder: Path) -> list[Metrics]:
    """The rows of a run's curve."""
    with open(folder / "metrics.csv", newline="") as file:
        rows = [{name: float(cell) if cell else None for name, cell in row.items()} for row in csv.DictReader(file)]
    return [Metrics(**row) for row in rows]  # type: ignore[arg-type]


def curve(folder: Path) -> list[tuple[object, ...]]:
    """The columns of the curve that do not depend on the clock."""
    return [
        (row.step, row.loss, row.validation_loss, row.learning_rate, row.gradient_norm) for row in read_metrics(folder)
    ]


def newest(folder: Path) -> Path:
    """The newest checkpoint of a run."""
    return listed(checkpoints_of(folder))[-1][1]


def files(folder: Path) -> dict[str, bytes]:
    """The content of every file except the lock."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != "run.lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def assert_same_run(first: Path, second: Path) -> None:
    """Curve, weights and optimizer have the same bits."""
    assert curve(first) == curve(second)
    assert read_checkpoint(newest(first)).step == read_checkpoint(newest(second)).step
    left, right = (whole_tensors(newest(folder)) for folder in (first, second))
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


def before_step(patch: pytest.MonkeyPatch, number: int, act: Callable[[Trainer], object]) -> None:
    """Call `act` when the step of this number begins."""
    step = Trainer.step

    def watched(trainer: Trainer, index: int) -> Update:
        if index == number:
            act(trainer)
        return step(trainer, index)

    patch.setattr(Trainer, "step", watched)


def killed(trainer: Trainer) -> None:
    """End the run without letting it save anything."""
    raise RuntimeError("killed")


# With dropout and accumulation the random numbers of every micro-batch matter.
_RUN = ["model.dropout=0.1", "train.accumulate=2"]


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 12 steps. Its output is in printed.txt beside it."""
    folder = tmp_path_factory.mktemp("finished")
    asked = [*tiny_on(write_text_file(folder)), *_RUN, f"train.output={folder / 'run'}", "train.sample_bytes=40"]
    (folder / "printed.txt").write_text(run_train(asked))
    return folder / "run"


@pytest.fixture(scope="session")
def resumed(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run with TensorBoard, killed in its tenth step and continued. printed.txt has the last output."""
    folder = tmp_path_factory.mktemp("resumed")
    text = finished.parent / "text.py"
    with pytest.MonkeyPatch.context() as patch:
        before_step(patch, 10, killed)
        with pytest.raises(RuntimeError, match="killed"):
            run_train([*tiny_on(text), *_RUN, f"train.output={folder / 'run'}", "train.log=[tensorboard]"])
    assert [row[0] for row in curve(folder / "run")] == list(range(1, 10))
    torch.manual_seed(999)
    (folder / "printed.txt").write_text(run_train([f"train.resume={folder / 'run'}", "train.sample_bytes=40"]))
    return folder / "run"


@pytest.fixture
def own(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run that a test may change."""
    return Path(shutil.copytree(finished, tmp_path / "own"))


@pytest.fixture
def hangup() -> Iterator[None]:
    """Let a hangup end a process, also if the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
