"""Trainings over the processes of torchrun, beside one process: the same losses, at any world size."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from fuselayers.cli.train import train
from fuselayers.configs import compose
from rich.console import Console

from .torchrun import curve, run_all

pytest.importorskip("torch.distributed").is_available() or pytest.skip("no torch.distributed", allow_module_level=True)

_DROPOUT = ("model.dropout=0.1", "attention.dropout=0.1", "feedforward.dropout=0.1")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.py"
    path.write_text("".join(f"def name_{index}(value):\n    return value + {index % 7}\n\n\n" for index in range(300)))
    return path


@pytest.fixture(scope="module")
def small(text: Path) -> list[str]:
    """Overrides of a run of six steps, without dropout."""
    model = ("model.hidden_dim=16", "model.num_layers=2", "model.context_length=16", "attention.num_heads=2")
    training = ("train.steps=6", "train.warmup_steps=2", "train.batch_size=4", "train.evaluate_every=3")
    ending = ("train.evaluate_batches=2", "train.checkpoint_every=3", "train.sample_bytes=0", "train.compare=false")
    where = ("train.device=cpu", f"data.path={text}", "fusion=off", "model.dropout=0")
    return [*model, *training, *ending, *where]
