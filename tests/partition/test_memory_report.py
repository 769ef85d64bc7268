import dataclasses
import io
import json

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from fuselayers.partition import CostModel, MemoryReport, budget, explain, machine_of
from fuselayers.partition.partitioners import SavePolicy


def layer(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.gelu(x @ up).square() @ down


@pytest.fixture(scope="module")
def report() -> MemoryReport:
    shapes = (32, 48), (48, 96), (96, 48)
    return explain(layer, *[torch.randn(shape, requires_grad=True) for shape in shapes])


def test_json_holds_every_figure(report: MemoryReport) -> None:
    content = json.loads(report.to_json())
    assert content["subject"] == "layer"
    assert content["totals"]["this"]["saved_bytes"] == report.totals["this"].saved_bytes
    assert [value["name"] for value in content["saved"]] == [value.name for value in report.saved]
    assert content["saved"][0].keys() == {"name", "module", "op", "source", "shape", "dtype", "num_bytes", "reason"}
    assert "graphs" not in content


def test_text_names_what_costs_most_and_sums_up_the_rest(report: MemoryReport) -> None:
    text = str(report)
    assert text.startswith("layer: min_cut for inductor, prices of ")
    largest = max(report.saved, key=lambda value: value.num_bytes)
    assert largest.name in text
    lines = text.splitlines()
    eager = next(line for line in lines if line.startswith("eager"))
    assert eager.split()[3:5] == ["1.00", "x"]
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115 (closed with the process)
    report.print(console, most=1)
    assert f"{len([value for value in report.saved if value.num_bytes]) - 1} more" in console.export_text()


def test_the_curve_goes_from_no_recompute_to_the_least_memory(report: MemoryReport) -> None:
    curve = report.pareto(points=6)
    sizes, flops = [point.saved_bytes for point in curve], [point.recomputed_flops for point in curve]
    assert sizes == sorted(sizes, reverse=True)
    assert flops == sorted(flops)
    assert flops[0] == 0
    assert sizes[-1] == (32 * 48 + 48 * 96 + 96 * 48) * 4  # the inputs, which cannot be recomputed


def test_the_curve_is_at_the_reports_own_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    dear = CostModel(machine=machine_of("cpu"), memory_price=9.0)
    report = explain(torch.sin, torch.randn(8, requires_grad=True), partition=budget(1.0, cost=dear))
    used = []
    monkeypatch.setattr(SavePolicy, "saved_values", lambda rule, joint, *, fused: used.append(rule.cost) or [])
    report.pareto(points=2)
    assert used == [dear, dear]
    assert "cost" not in report.as_dict()


def test_two_explanations_of_the_same_are_equal(report: MemoryReport) -> None:
    shapes = (32, 48), (48, 96), (96, 48)
    assert explain(layer, *[torch.randn(shape, requires_grad=True) for shape in shapes]) == report


def test_a_notebook_shows_the_totals_and_the_largest_values(report: MemoryReport) -> None:
    page = dataclasses.replace(report, subject="<i>layer</i>")._repr_html_()
    assert page.startswith("<pre>&lt;i&gt;layer&lt;/i&gt;: min_cut for inductor")
    assert all(f"\n{rule} " in page for rule in report.totals)
    largest = max(report.saved, key=lambda value: value.num_bytes)
    assert f"{'x'.join(map(str, largest.shape))} float32" in page
    many = dataclasses.replace(report, saved=tuple([largest] * 50))
    assert "\n40 more " in many._repr_html_()


def test_values_are_named_by_module_and_op() -> None:
    block = nn.Sequential(nn.Linear(8, 16), nn.GELU())
    x = torch.randn(4, 2, 8, requires_grad=True)
    report = explain(lambda q: F.scaled_dot_product_attention(q, q, q).sum() + block(x).sum(), x[None], backend="eager")
    found = {(value.module, value.op) for value in report.saved}
    assert any(op.startswith("aten._scaled_dot_product") for _, op in found)
    report = explain(block, x, backend="eager")
    assert ("0", "aten.addmm.default") in {(value.module, value.op) for value in report.saved}
    assert "0 addmm (addmm)" in str(report)


def test_tables_fit_eighty_columns_and_no_path_is_broken(report: MemoryReport) -> None:
    long = dataclasses.replace(report.saved[0], module="blocks.11.residual.norms.0", op="aten.addmm.default")
    report = dataclasses.replace(report, saved=(long, *report.saved[1:]))
    console = Console(width=80, record=True, file=io.StringIO())
    report.print(console)
    # The first line and the last two are sentences.
    lines = console.export_text().splitlines()[1:-2]
    assert all(len(line) <= 80 for line in lines)
    assert any(line.startswith("blocks.11.residual.norms.0 ") for line in lines)


@pytest.mark.parametrize("width", [80, 100, 160])
def test_no_word_of_a_reason_is_cut_off(report: MemoryReport, width: int) -> None:
    reason = (
        "read by mul_1, sub_3 and others; saving it costs 655.6 kB moved; recomputing it would need view_4, addmm_1"
    )
    long = dataclasses.replace(
        report.saved[0], module="blocks.11.residual.norms.0", shape=(1, 4, 128, 64), reason=reason
    )
    console = Console(width=width, record=True, file=io.StringIO())
    dataclasses.replace(report, saved=(long, *report.saved[1:])).print(console)
    printed = console.export_text().split()
    assert set(reason.split()) <= set(printed)
