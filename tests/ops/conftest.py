"""What the tests of kernels have in common: no kernel may touch what is not its own."""

from collections.abc import Iterator

import pytest

from fuselayers.ops.implementations.launch import INTERPRETED
from tests.testing.meter import Launch, metered


@pytest.fixture(autouse=True)
def launches(request: pytest.FixtureRequest) -> Iterator[list[Launch]]:
    """Where kernels are interpreted, each launch of a test is metered: out of bounds and double stores are errors."""
    if INTERPRETED and request.node.get_closest_marker("kernels"):
        with metered() as metered_launches:
            yield metered_launches
    else:
        yield []
