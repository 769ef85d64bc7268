"""What every test starts from: the same random numbers, and no compiled code of another test file."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _nothing_measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No measurement of the machine decides what a test runs, and none of a test is kept for its user."""
    from fuselayers.partition import patience

    with pytest.MonkeyPatch.context() as patch, patience(math.inf):
        patch.setenv("FUSELAYERS_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True, scope="module")
def _no_compiled_code_of_others() -> Iterator[None]:
    # Dynamo counts recompilations per code object and gives up at a limit, so one file's calls could turn another
    # file's compiled function into a plain one.
    yield
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from fuselayers.ops.forms.launch import why_no_kernels

    reason = why_no_kernels(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if reason is not None:
        for item in items:
            if item.get_closest_marker("kernels"):
                item.add_marker(pytest.mark.skip(reason=reason))
