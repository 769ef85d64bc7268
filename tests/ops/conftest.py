"""Every test of kernels checks their memory accesses."""

from collections.abc import Iterator

import pytest

from fuselayers.ops.implementations.launch import INTERPRETED
from tests.testing.meter import Launch, metered


@pytest.fixture(autouse=True)
def launches(request: pytest.FixtureRequest) -> Iterator[list[Launch]]:
    """In Triton's interpreter, meter each launch: accesses out of bounds and double stores are errors."""
    if INTERPRETED and request.node.get_closest_marker("kernels"):
        with metered() as metered_launches:
            yield metered_launches
    else:
        yield []
