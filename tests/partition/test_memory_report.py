import dataclasses
import io
import json

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from fuselayers.partition import MemoryReport, explain


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
    always = {"name", "module", "op", "source", "shape", "dtype", "num_bytes", "reason"}
    assert content["saved"][0].keys() == {*always, "exact_bytes", "why_exact", "error"}
    assert (content["compress"], content["gradient_errors"]) == (None, {})
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
