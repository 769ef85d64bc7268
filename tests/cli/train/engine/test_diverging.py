"""A number that goes wrong on one process stops all, with the same words."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from .torchrun import curve, overrides, run_all, written_text

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed"),
    pytest.mark.slow,
]

_LAYERS = {
    "output": "blocks.1.feedforward.up",
    "weight": "blocks.1.feedforward.down",
    "gradient": "blocks.1.feedforward.up",
}
_LAYOUTS = {
    "fsdp": ("parallel=fsdp",),
    "accumulated": ("parallel=fsdp", "train.accumulate=2"),
    "fused": ("parallel=fsdp", "fusion=eager", "fusion.scope=block"),
    "ddp": ("parallel=ddp",),
    "tp": ("parallel.tp=2",),
    "sequence": ("parallel.tp=2", "parallel.sequence=true"),
}
# What is compiled ignores the hook that spoils an output.
_CASES = [
    *((layout, what) for layout in _LAYOUTS for what in ("output", "weight") if (layout, what) != ("fused", "output")),
    ("fsdp", "gradient"),
    ("tp", "gradient"),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("diverging")


@pytest.fixture(scope="module")
def ended(root: Path) -> dict[str, dict[str, Any]]:
    """What became of runs of two processes whose rank 1 has a NaN from the third step on."""
    text = written_text(root)
    given: dict[str, list[str]] = {}
    events: dict[str, tuple[object, ...]] = {}
    for layout, what in _CASES:
        name = f"{layout}_{what}"
        given[name] = [*overrides(text, "feedforward=mlp", *_LAYOUTS[layout]), f"train.output={root / name}"]
        events[name] = (1, 3, what, _LAYERS[what])
    return run_all(2, given, events=events, folder=root)


@pytest.mark.parametrize(("layout", "what"), _CASES)
def test_all_stop_at_the_step_of_one_rank(ended: dict[str, dict[str, Any]], root: Path, layout: str, what: str) -> None:
    refused = ended[f"{layout}_{what}"]["refused"]
    loss = r"\d+\.\d+" if what == "gradient" else "nan"
    norm = "inf" if what == "gradient" else "nan"
    assert re.match(
        rf"training diverged at step 3: the loss is {loss} and the norm of its gradient {norm}; a checkpoint, ", refused
    ), refused
    assert [row.step for row in curve(root / f"{layout}_{what}")] == [1, 2]
