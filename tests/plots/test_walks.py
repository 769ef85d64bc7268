import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final

import pytest
import torch
from torch import nn

import fuselayers
from fuselayers.ops import bias_activation_dropout
from fuselayers.ops.cpu import has_kernels
from fuselayers.partition import fuse
from plots.walks import FOLDER, WALKS, Step, draw

_PACKAGE: Final = Path(fuselayers.__file__).parent


def _fused_step() -> None:
    fuse(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.1)), backend="eager", fallback=())(torch.randn(3, 8))


def _op() -> None:
    if not has_kernels():
        pytest.skip("no kernels in C++")
    x, bias = torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    bias_activation_dropout(x, bias, activation="gelu", p=0.1).sum().backward()


CALLS: Final[dict[str, Callable[[], None]]] = {"fused_step": _fused_step, "op": _op}


def _step_of(frame: FrameType) -> Step | None:
    path = Path(frame.f_code.co_filename)
    return Step(path.relative_to(_PACKAGE).as_posix(), frame.f_code.co_qualname) if _PACKAGE in path.parents else None


def _passed(call: Callable[[], None], *, last: str = "") -> tuple[list[Step], list[Step]]:
    """The functions of the package that ran, in their order, and those that were running when `last` began."""
    ran: list[Step] = []
    running: list[Step] = []

    def note(frame: FrameType | None, event: str, _: Any) -> None:
        step = _step_of(frame) if event == "call" and frame is not None else None
        if step is None:
            return
        ran.append(step)
        while step.function == last and frame is not None:
            running.extend([outer] if (outer := _step_of(frame)) else [])
            frame = frame.f_back

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return ran, running


@pytest.mark.parametrize("name", WALKS)
def test_the_call_passes_the_functions_in_the_picture(name: str) -> None:
    ran = iter(_passed(CALLS[name])[0])
    assert [step for step in WALKS[name] if step.file != "torch" and step not in ran] == []


def test_a_step_reaches_its_cut_through_few_functions() -> None:
    _, running = _passed(_fused_step, last="saved_by_min_cut")
    assert 0 < sum(step.file.startswith("partition/") for step in running) <= 15


def test_what_is_checked_in_is_what_the_script_draws(tmp_path: Path) -> None:
    for path in draw(tmp_path):
        words = [
            re.findall(r"<text[^>]*>([^<]*)</text>", file.read_text(encoding="utf-8"))
            for file in (path, FOLDER / path.name)
        ]
        assert words[0] == words[1]
        assert len(words[0]) > 10
