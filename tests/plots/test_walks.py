import ast
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from fuselayers.components import get
from fuselayers.ops import bias_activation_dropout
from fuselayers.ops.cpu import has_kernels
from fuselayers.partition import fuse
from plots.components import FOLDER, draw
from plots.walks import PICTURES, WALKS, Step

_PACKAGE = Path(__file__).parents[2] / "fuselayers"


def _names(step: Step) -> set[str]:
    """The names that a function reads, and those that the functions of its file read which it calls."""
    tree = ast.parse((_PACKAGE / step.file).read_text(encoding="utf-8"))
    inside: ast.AST = tree
    for name in step.function.split("."):  # a function that is not there raises StopIteration
        inside = next(node for node in ast.iter_child_nodes(inside) if getattr(node, "name", None) == name)
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    read: set[str] = set()
    waiting = [inside]
    while waiting:
        nodes = list(ast.walk(waiting.pop()))
        new = {node.id for node in nodes if isinstance(node, ast.Name)} - read
        new |= {node.attr for node in nodes if isinstance(node, ast.Attribute)} - read
        read |= new
        waiting += [functions[name] for name in new if name in functions]
    return read


@pytest.mark.parametrize("walk", WALKS.values(), ids=WALKS)
def test_every_call_of_a_walk_is_in_the_code(walk: tuple[Step, ...]) -> None:
    assert {number for step in walk for number in step.calls} == set(range(1, len(walk)))
    for step in walk:
        names = _names(step)
        for called in (walk[number] for number in step.calls):
            if called.by_name and called.file.startswith("components/"):
                kind = called.function.partition(".")[0]
                assert any(base.__name__ == kind for base in get("model", "decoder").__mro__)
            elif not called.by_name:
                assert called.function.rpartition(".")[2] in names, (step.function, called.function)


def _step() -> None:
    fuse(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.1)), backend="eager", fallback=())(torch.randn(3, 8))


def _op() -> None:
    if not has_kernels():
        pytest.skip("no kernels in C++")
    x, bias = torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    bias_activation_dropout(x, bias, activation="gelu", p=0.1).sum().backward()


def _place(frame: FrameType | None) -> tuple[str, str]:
    assert frame is not None
    path = Path(frame.f_code.co_filename)
    return path.relative_to(_PACKAGE).as_posix() if _PACKAGE in path.parents else "", frame.f_code.co_qualname


def _passed(call: Callable[[], None], *, last: str = "") -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """The package's files and functions that ran, in their order, and those that were running when `last` began."""
    ran, running = [], []

    def note(frame: Any, event: str, _: Any) -> None:
        if event != "call" or not _place(frame)[0]:
            return
        ran.append(_place(frame))
        if frame.f_code.co_name == last:
            while frame is not None:
                running.extend([_place(frame)] if _place(frame)[0] else [])
                frame = frame.f_back

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return ran, running


@pytest.mark.parametrize(("name", "call"), [("fused_step", _step), ("op", _op)])
def test_the_call_passes_the_functions_of_the_walk(name: str, call: Callable[[], None]) -> None:
    ran = iter(_passed(call)[0])
    assert [step for step in WALKS[name] if (step.file, step.function) not in ran] == []


def test_a_step_reaches_its_cut_through_few_functions() -> None:
    _, running = _passed(_step, last="saved_by_min_cut")
    assert 0 < sum(file.startswith("partition/") for file, _ in running) <= 15


@pytest.mark.parametrize("name", PICTURES)
def test_what_is_checked_in_is_what_the_script_draws(name: str, tmp_path: Path) -> None:
    drawn = {path.stem: path for path in draw(tmp_path, PICTURES)}[name]
    # Compare the words: another version of matplotlib writes other bytes.
    words = [re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text()) for path in (FOLDER / drawn.name, drawn)]
    assert words[0] == words[1]
