import sys
from collections.abc import Iterator

import pytest

from fuselayers import errors


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each test see warnings that another one in this process has had."""
    monkeypatch.setattr(errors, "_said", set())


@pytest.fixture(autouse=True)
def no_accelerator_of_others() -> Iterator[None]:
    """Accelerate keeps its settings for the whole process: the next Accelerator has the last one's mixed precision."""
    yield
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
