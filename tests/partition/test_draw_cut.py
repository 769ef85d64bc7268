import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuselayers.partition import MemoryReport, budget, explain
from fuselayers.partition.draw_cut import svg_of

SAVED, RECOMPUTED, UNSAVED, GRADIENT = "#d1495b", "#74b3ce", "#ced4da", "#95d5b2"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(16)])
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norms[0](x))))


class Model(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.token = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(16, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def picture(report: MemoryReport) -> ET.Element:
    return ET.fromstring(svg_of(report.graphs, "a <model>"))


def elements(root: ET.Element, tag: str) -> list[ET.Element]:
    return root.findall(f".//{{http://www.w3.org/2000/svg}}{tag}")


def texts(root: ET.Element) -> list[str]:
    """What is to be read, without the titles that a pointer shows."""
    found = []
    for one in elements(root, "text"):
        words = [one.text or "", *(f"{part.text or ''}{part.tail or ''}" for part in one if part.tag.endswith("tspan"))]
        found.append("".join(words).strip())
    return found


def boxes(root: ET.Element) -> list[ET.Element]:
    legend_ends = 56
    return [one for one in elements(root, "rect") if one.get("width") == "8" and float(one.get("y", 0)) > legend_ends]


@pytest.fixture(scope="module")
def deep() -> MemoryReport:
    return explain(Model(5), torch.zeros(2, 8, dtype=torch.int64), backend="eager")


@pytest.mark.slow
def test_blocks_that_look_the_same_are_drawn_once(deep: MemoryReport) -> None:
    root = picture(deep)
    found = texts(root)
    (title,) = [text for text in found if text.startswith("blocks.")]
    assert re.match(r"blocks\.0 to blocks\.4: 5 times, each saves [\d.]+ kB$", title)
    assert found[0] == "a <model>"
    shallow = explain(Model(3), torch.zeros(2, 8, dtype=torch.int64), backend="eager")
    assert picture(shallow).get("height") == root.get("height")


def test_values_are_named_by_module_and_op(deep: MemoryReport) -> None:
    found = texts(picture(deep))
    assert any(re.match(r"up addmm [\d.]+ kB$", text) for text in found)
    assert any(text.startswith("norms.0 layer_norm") for text in found)
    assert "token embedding_dense_backward" in found
    assert {"forward, time runs down", "backward, time runs up"} <= set(found)
    assert not any("getitem" in text for text in found)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v)


def test_a_long_name_is_whole() -> None:
    x = torch.randn(2, 8, 16, requires_grad=True)
    found = texts(picture(explain(Attention(), x, backend="eager")))
    assert "scaled_dot_product_flash_attention_for_cpu_backward, cat" in found
    assert all(len(text) < 80 for text in found)


def test_a_pointer_finds_the_nodes_of_the_report(deep: MemoryReport) -> None:
    titles = "\n".join(one.text or "" for one in elements(picture(deep), "title"))
    first_blocks = [value for value in deep.saved if value.num_bytes][:3]
    for value in first_blocks:
        assert re.search(rf"^{value.name}: .*\[{', '.join(map(str, value.shape))}\], saved, ", titles, re.MULTILINE)


def layer(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.gelu(x @ up) @ down


@pytest.fixture(scope="module")
def report() -> MemoryReport:
    inputs = [torch.randn(shape, requires_grad=True) for shape in ((32, 48), (48, 96), (96, 48))]
    return explain(layer, *inputs, partition=budget(0.8))


def test_a_red_line_goes_from_each_saved_value_to_its_readers(report: MemoryReport) -> None:
    root = picture(report)
    lines = elements(root, "path")
    assert {one.get("stroke") for one in lines} == {SAVED}
    ends = [re.findall(r"[\d.]+", one.get("d", "")) for one in lines]
    assert {(x, to_x) for x, *_, to_x, _ in ends} == {("436", "684")}
    saved = {one.get("y") for one in boxes(root) if one.get("fill") == SAVED}
    assert len(saved) == len([value for value in report.saved if value.num_bytes]) > 1
    assert {f"{float(y) - 4:.1f}" for _, y, *_ in ends} == saved
    assert max(float(one.get("stroke-width", 0)) for one in lines) == 3.0


def test_every_row_is_inside_of_the_picture(report: MemoryReport, deep: MemoryReport) -> None:
    for one in (report, deep):
        root = picture(one)
        height = float(root.get("height", 0))
        places = [(box.get("x"), box.get("y")) for box in boxes(root)]
        assert len(set(places)) == len(places)
        assert all(0 < float(y or 0) < height - 8 for _, y in places)
        assert {box.get("fill") for box in boxes(root)} <= {SAVED, RECOMPUTED, UNSAVED, GRADIENT}
    assert any(box.get("fill") == RECOMPUTED for box in boxes(picture(report)))


def test_every_graph_is_in_the_picture(tmp_path: Path) -> None:
    def broken(x: Tensor) -> Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    two = explain(broken, torch.ones(4, requires_grad=True), backend="eager")
    assert texts(picture(two)).count("forward, time runs down") == len(two.graphs) == 2
