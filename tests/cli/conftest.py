"""A text and a config so small that a run takes a second."""

from functools import partial
from pathlib import Path

import pytest
import torch

_LINES = [f"def name_{index}(value):\n    return value + {index % 7}\n\n\n" for index in range(300)]

TINY_MODEL = (
    "model.hidden_dim=16",
    "model.num_layers=1",
    "model.context_length=16",
    "attention.num_heads=2",
)
TINY_TRAINING = (
    "train.steps=12",
    "train.warmup_steps=2",
    "train.batch_size=4",
    "train.evaluate_every=4",
    "train.evaluate_batches=2",
    "train.checkpoint_every=4",
    "train.sample_bytes=0",
    "train.compare=false",
    "train.device=cpu",
)


@pytest.fixture(autouse=True)
def _no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    # pytest-xdist passes the width of its terminal to its workers. A table would be folded at that width.
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns for any line. Used by tests that read the lines of a table."""
    monkeypatch.setenv("COLUMNS", "500")


@pytest.fixture
def without_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile without its code generator, which takes seconds. Used by the tests of `bench`."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


def write_text_file(folder: Path) -> Path:
    """The text of `text_file`, in a folder that more than one test reads."""
    path = folder / "text.py"
    path.write_text("".join(_LINES))
    return path


def tiny_on(text_file: Path) -> list[str]:
    """The overrides of `tiny`, for a text that more than one test reads."""
    return [*TINY_MODEL, *TINY_TRAINING, "fusion=off", "model.dropout=0", f"data.path={text_file}"]


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    return write_text_file(tmp_path)


@pytest.fixture
def tiny(text_file: Path) -> list[str]:
    """Overrides of a run that takes a second: a tiny model without fusion, 12 steps, a checkpoint every 4."""
    return tiny_on(text_file)
