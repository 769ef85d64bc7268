import xml.etree.ElementTree as ET
from pathlib import Path

import matplotlib.image
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fuselayers.partition import (
    MemoryReport,
    aot_function,
    budget,
    draw_graph,
    explain,
)


def layer(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.gelu(x @ up) @ down


@pytest.fixture(scope="module")
def report() -> MemoryReport:
    inputs = [torch.randn(shape, requires_grad=True) for shape in ((32, 48), (48, 96), (96, 48))]
    return explain(layer, *inputs, partition=budget(0.8))


def elements(path: Path, tag: str) -> list[ET.Element]:
    return ET.parse(path).getroot().findall(f".//{{http://www.w3.org/2000/svg}}{tag}")


def test_a_curve_is_drawn(report: MemoryReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.axes import Axes

    steps: list[str] = []
    step = Axes.step
    monkeypatch.setattr(
        Axes, "step", lambda axis, *a, where, **k: steps.append(where) or step(axis, *a, where=where, **k)
    )
    text = report.draw_pareto(tmp_path / "curve.svg").read_text()
    assert "torch min_cut" in text
    assert "MB saved for backward" in text
    assert matplotlib.image.imread(report.draw_pareto(tmp_path / "curve.png")).shape[0] > 200
    # The curve goes from the most memory to the least. A budget between two points costs as much as the smaller.
    assert steps == ["pre", "pre"]


def wave(a: Tensor, b: Tensor) -> Tensor:
    return (a + b).cos().cos()


def traced_wave() -> torch.fx.GraphModule:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    aot_function(wave, keep)(torch.ones(3, requires_grad=True), torch.ones(3))
    return graphs[0]


@pytest.mark.parametrize("suffix", ["", ".svg"])
def test_one_graph(suffix: str, tmp_path: Path) -> None:
    graph = traced_wave()
    code = graph.code
    path = draw_graph(graph, tmp_path / f"wave{suffix}", figname="a <wave>", clear_meta=False)
    assert path == tmp_path / f"wave{suffix or '.svg'}"
    assert graph.code == code
    text = path.read_text()
    assert "a &lt;wave&gt;" in text
    assert "aten.cos.default  float32[3]" in text
    boxes = elements(path, "rect")
    assert len(boxes) == len([node for node in graph.graph.nodes if node.op != "output"])
    assert {box.get("x") for box in boxes} == {"116"}  # on the left, with the labels beside them
    reads = [user for node in graph.graph.nodes for user in node.users if user.op != "output"]
    assert len(elements(path, "path")) == len(reads)


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    graph = traced_wave()
    with pytest.raises(ValueError, match=r"^a picture's file must end in \.svg, got "):
        draw_graph(graph, tmp_path / "wave.pdf")
