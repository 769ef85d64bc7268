"""`swap` on every class of transformers that can be made small: the table of docs/swap.md, as a test."""

import json
import subprocess
import sys
from typing import Final

import pytest

from tests.components.swap.classes import SECONDS_OF_SWAP, class_names

# By level: each n-th class is tried, in so many parts. Blocks take several seconds each.
TRIED: Final = {"layers": (1, 40), "blocks": (4, 10)}


# Some 600 classes; a third cannot be made small, or plain transformers does not run them on a batch made from a config.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("level", "part"), [(level, part) for level, (_, parts) in TRIED.items() for part in range(parts)]
)
def test_every_class_stays_right(level: str, part: int) -> None:
    every, parts = TRIED[level]
    # A new process, since one that has computed cannot fork.
    command = [sys.executable, "-m", "tests.components.swap.classes", level, *class_names()[::every][part::parts]]
    printed = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True).stdout
    _, *outcomes = map(json.loads, printed.splitlines())
    assert [row for row in outcomes if row["outcome"] not in ("right", "nothing", "not run")] == []
    assert [row for row in outcomes if row.get("seconds", 0) > SECONDS_OF_SWAP] == []
    assert any(row["outcome"] == "right" for row in outcomes)
