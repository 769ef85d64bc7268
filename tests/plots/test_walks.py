import ast
import re
from pathlib import Path

import pytest

from fuselayers.components import get
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
            if called.by_name:
                kind = called.function.partition(".")[0]
                assert any(base.__name__ == kind for base in get("model", "decoder").__mro__)
            else:
                assert called.function.rpartition(".")[2] in names, (step.function, called.function)


@pytest.mark.parametrize("name", PICTURES)
def test_what_is_checked_in_is_what_the_script_draws(name: str, tmp_path: Path) -> None:
    drawn = {path.stem: path for path in draw(tmp_path, PICTURES)}[name]
    # Compare the words: another version of matplotlib writes other bytes.
    words = [re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text()) for path in (FOLDER / drawn.name, drawn)]
    assert words[0] == words[1]
