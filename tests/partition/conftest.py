"""An own file of times, no warm-up, and a clock that a test sets, for the tests of "auto"."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from fuselayers.partition import auto, warm_up
from tests.partition.measured import Measured, eager_for_inductor

__all__ = ["eager_as_inductor", "measured", "own_memory"]


@pytest.fixture
def eager_as_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of which backend serves and when: Inductor takes seconds to compile."""
    eager_for_inductor(monkeypatch)


@pytest.fixture
def own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FUSELAYERS_CACHE", str(tmp_path))
    monkeypatch.setattr(auto, "_ROUNDS", 5)
    torch.compiler.reset()  # Dynamo remembers by file and line which sizes changed in another test
    with warm_up(0):
        yield


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Measured]:
    def say(fastest: str) -> Measured:
        clock = Measured(fastest)
        monkeypatch.setattr(auto, "seconds_of", clock)
        return clock

    return say
