import signal
from collections.abc import Iterator

import pytest


@pytest.fixture
def hangup() -> Iterator[None]:
    """A hangup ends a process, also where the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
