"""Imports the package before pytest does, gives each process one thread, and collects kernels where they are.

Given one file of it, `--doctest-modules` would else run that file twice, as itself and as a part of its package, and
the second one finds its names in the registry taken.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fuselayers as fuselayers

# The second run of `make test` asks for tests of kernels alone. Importing all others takes 8 s of each process there.
_WITH_KERNELS = tuple(
    Path(__file__).parent / "tests" / folder for folder in ("cli/tune", "gpu", "ops", "partition/passes", "testing")
)


def _has_kernels(path: Path) -> bool:
    return any(path.is_relative_to(folder) for folder in _WITH_KERNELS)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    of_kernels = config.option.markexpr in ("kernels", "kernels and not slow")
    return True if of_kernels and collection_path.suffix == ".py" and not _has_kernels(collection_path) else None


@pytest.hookimpl(tryfirst=True)  # before it is skipped, where no kernel runs
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("kernels") and not _has_kernels(item.path):
        pytest.fail("it runs kernels: add its folder to _WITH_KERNELS in the first conftest.py", pytrace=False)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """One thread for each process: with tensors this small, threads of several workers mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # of processes that tests start
        yield
    torch.set_num_threads(threads)
