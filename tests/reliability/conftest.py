"""The cases of a test."""

import pytest

from tests.reliability.cases import CHOSEN, Cases


@pytest.fixture(
    params=[
        "few",
        # Cases that are chosen by name or number run in the quick part.
        *([] if CHOSEN else [pytest.param("rest", marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]),
    ]
)
def cases(request: pytest.FixtureRequest) -> Cases:
    """The cases of a test."""
    return Cases(request.node.nodeid.replace("[rest", "[few"), few=request.param == "few")
