import functools
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import matplotlib.image
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fuselayers.partition import (
    Receipt,
    aot_function,
    budget,
    default_partition,
    draw_graph,
    draw_joint_graph,
    explain,
    saved_bytes,
)
from fuselayers.partition.draw import draw_curve


def layer(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.gelu(x @ up) @ down


@pytest.fixture(scope="module")
def receipt() -> Receipt:
    inputs = [torch.randn(shape, requires_grad=True) for shape in ((32, 48), (48, 96), (96, 48))]
    return explain(layer, *inputs, partition=budget(0.8))


def test_svg_draws_a_red_line_for_each_reader_of_a_saved_value(receipt: Receipt, tmp_path: Path) -> None:
    path = receipt.draw(tmp_path / "cut.svg")
    text = path.read_text()
    ET.fromstring(text)
    (graph,) = receipt.graphs
    given = {node.name: node for node in graph.backward.graph.find_nodes(op="placeholder")}
    expected = sum(len(given[value.name].users) for value in receipt.saved if value.name in given)
    assert len(re.findall(r"<path [^>]*fill: none; stroke: #d1495b", text)) == expected


def test_png_is_a_picture(receipt: Receipt, tmp_path: Path) -> None:
    picture = matplotlib.image.imread(receipt.draw(tmp_path / "cut.png"))
    assert picture.shape[0] > 200
    red = (picture[..., 0] > 0.7) & (picture[..., 1] < 0.4)
    assert red.any()


def test_dot_has_both_graphs_and_the_cut_between_them(receipt: Receipt, tmp_path: Path) -> None:
    text = receipt.draw(tmp_path / "cut.dot").read_text()
    assert text.startswith('digraph "layer: budget(0.8) for inductor keeps ')
    (graph,) = receipt.graphs
    for side, module in (("forward", graph.forward), ("backward", graph.backward)):
        for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default):
            assert f'"{side}0.{node.name}" [label=' in text
    crossing = re.findall(r'"forward0\.(\w+)" -> "backward0\.(\w+)"', text)
    assert {start for start, _ in crossing} == {value.name for value in receipt.saved}
    again = {value.name for value in receipt.recomputed}
    assert all(f'"backward0.{name}" [label="{name}' in text for name in again)
    assert text.count('fillcolor="#a9d6e5"') >= len(again) > 0


def test_a_curve_is_drawn(receipt: Receipt, tmp_path: Path) -> None:
    text = receipt.draw_pareto(tmp_path / "curve.svg", points=4).read_text()
    assert "torch min_cut" in text
    assert "MB saved for backward" in text


def test_other_files_are_refused(receipt: Receipt, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^a picture's file must end in \.svg, \.png, \.dot, got '.*cut\.pdf'$"):
        receipt.draw(tmp_path / "cut.pdf")
    with pytest.raises(ValueError, match=r"^a picture's file must end in \.svg, \.png, got '.*curve\.dot'$"):
        receipt.draw_pareto(tmp_path / "curve.dot")
    assert not list(tmp_path.iterdir())


def test_between_two_budgets_the_curve_is_what_the_smaller_one_costs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from matplotlib.axes import Axes

    steps: list[str] = []
    step = Axes.step
    monkeypatch.setattr(
        Axes, "step", lambda axis, *a, where, **k: steps.append(where) or step(axis, *a, where=where, **k)
    )
    draw_curve([(3.0, 0.0), (1.0, 10.0)], {"$$": (2.0, 5.0)}, tmp_path / "curve.svg", title="$$")
    # From the most memory to the least, a budget between two points has to do with the smaller one's.
    assert steps == ["pre"]


def wave(a: Tensor, b: Tensor) -> Tensor:
    return (a + b).cos().cos()


def traced_wave() -> torch.fx.GraphModule:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    aot_function(wave, keep)(torch.ones(3, requires_grad=True), torch.ones(3))
    return graphs[0]


@pytest.mark.parametrize("suffix", ["", ".svg", ".png", ".dot"])
def test_one_graph(suffix: str, tmp_path: Path) -> None:
    graph = traced_wave()
    code = graph.code
    path = draw_graph(graph, tmp_path / f"wave{suffix}", figname="a wave", clear_meta=False, parse_stack_trace=True)
    assert path == tmp_path / f"wave{suffix or '.svg'}"
    assert graph.code == code
    if path.suffix == ".png":
        assert matplotlib.image.imread(path).shape[0] > 100
    else:
        text = path.read_text()
        assert "a wave" in text
        assert "aten.cos.default  float32[3]" in text
        assert "return (a + b).cos().cos()" in text


def test_one_graph_for_graphviz(tmp_path: Path) -> None:
    path = draw_graph(traced_wave(), tmp_path / "wave.dot", dot_graph_shape="oval")
    text = path.read_text()
    assert 'node [shape="oval"' in text
    assert '"add" -> "cos";' in text
    assert "float32" not in text


def test_the_joint_graph_is_drawn_on_its_way_to_the_default_partition(tmp_path: Path) -> None:
    path = tmp_path / "joint.dot"
    a, b = torch.randn(50, requires_grad=True), torch.randn(50)
    cut = functools.partial(draw_joint_graph, file_name=path)
    drawn = aot_function(wave, lambda graph, inputs: graph, partition_fn=cut)
    plain = aot_function(wave, lambda graph, inputs: graph, partition_fn=default_partition)
    assert saved_bytes(drawn, a, b) == saved_bytes(plain, a, b) == 400
    assert path.read_text().startswith('digraph "joint graph, cut by default_partition')


def test_what_cannot_be_drawn_so(tmp_path: Path) -> None:
    graph = traced_wave()
    with pytest.raises(ValueError, match=r"^a picture's file must end in \.svg, \.png, \.dot, got "):
        draw_graph(graph, tmp_path / "wave.pdf")
    with pytest.raises(
        ValueError, match=r"^prog must be None, got 'neato': pictures are drawn without Graphviz, which"
    ):
        draw_graph(graph, tmp_path / "wave.svg", prog="neato")
    with pytest.raises(
        ValueError, match=r"^dot_graph_shape is for a \.dot file, which Graphviz draws; got 'oval' for "
    ):
        draw_graph(graph, tmp_path / "wave.svg", dot_graph_shape="oval")
