import time
from typing import Any

import pytest
import torch

from fuselayers.partition import fuse, min_cut


def test_each_compilation_that_takes_long_says_what_it_does(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A second in place of three, still longer than these compilations take.
    monkeypatch.setattr("fuselayers.partition.compilers.slow_compile._SECONDS", 1.0)

    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(1.2)
        return min_cut(*arguments, **options)

    fused = fuse(lambda x: x.sin().cos(), backend="eager", partition=slow)
    for size in (3, 5):
        fused(torch.ones(size, requires_grad=True))
    fuse(lambda x: x.sin().cos(), backend="eager")(torch.ones(3, requires_grad=True))
    lines = [line for line in caplog.messages if "compiles a graph" in line]
    assert len(lines) == 2
    assert lines[0].startswith("eager compiles a graph of ")
    assert lines[0].endswith("set fusion=off in a config, use level='layers' in swap, or leave fuse out")
