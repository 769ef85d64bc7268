import sys
from collections.abc import Iterator

import pytest

from fuselayers import errors


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the warnings of earlier tests: a process shows each warning once."""
    monkeypatch.setattr(errors, "_warned", set())


@pytest.fixture(autouse=True)
def no_accelerator_of_others() -> Iterator[None]:
    """Reset Accelerate, which keeps settings such as mixed precision for the whole process."""
    yield
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
