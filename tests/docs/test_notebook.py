"""The notebook runs, and prints its stored output."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.processes import run

NOTEBOOK = Path(__file__).parents[2] / "docs" / "swap_an_mlp.ipynb"


def _code_cells() -> list[dict[str, Any]]:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def _stored(cell: dict[str, Any]) -> str:
    return "".join("".join(output.get("text", [])) for output in cell["outputs"])


@pytest.mark.slow
def test_it_prints_what_it_holds(tmp_path: Path) -> None:
    """All but the times, which depend on the machine. The picture is drawn, and is in the file."""
    cells = _code_cells()
    between = "\nprint('----')\n"
    program = between.join("".join(cell["source"]) for cell in cells)
    done = run(f"import matplotlib\nmatplotlib.use('Agg')\n{program}", name=str(NOTEBOOK), folder=tmp_path)
    assert done.code == 0, done.errors
    for cell, printed in zip(cells, done.printed.split("----\n"), strict=True):
        if " ms, " not in printed:
            assert printed == _stored(cell)
    assert "image/png" in cells[-1]["outputs"][0]["data"]


def test_it_was_run_from_top_to_bottom() -> None:
    cells = _code_cells()
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    assert [" ms, median of 15 steps" in _stored(cell) for cell in cells].count(True) == 1
