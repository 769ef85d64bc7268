"""Tests on the driver of driver.c, which `make gpu-hollow` loads; without it they are not collected."""

from pathlib import Path

from tests.gpu.hollow.driver import LOADED


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return None if LOADED else True
