"""The cases of a test, and an uninterrupted run."""

from pathlib import Path

import pytest

from tests.reliability.cases import cases
from tests.reliability.runs import overrides, start

__all__ = ["cases", "whole"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run and its text."""
    folder = tmp_path_factory.mktemp("whole")
    assert start(*overrides(folder), f"train.output={folder / 'run'}").wait().code == 0
    return folder
