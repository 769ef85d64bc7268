import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

from fuselayers.partition import draw_graph
from tests.partition.tracing import split_of


def elements(path: Path, tag: str) -> list[ET.Element]:
    return ET.parse(path).getroot().findall(f".//{{http://www.w3.org/2000/svg}}{tag}")


def traced_wave() -> torch.fx.GraphModule:
    tensors = torch.ones(3, requires_grad=True), torch.ones(3)
    forward, _ = split_of(lambda a, b: (a + b).cos().cos(), *tensors, partition="default")
    assert isinstance(forward, torch.fx.GraphModule)
    return forward


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
