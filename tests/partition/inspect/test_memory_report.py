import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fuselayers.partition import MemoryReport, SavedValue, explain


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


def test_text_names_the_largest_values_and_counts_the_rest(report: MemoryReport) -> None:
    text = str(report)
    assert text.startswith("layer: min_cut for inductor, prices of ")
    largest = max(report.saved, key=lambda value: value.num_bytes)
    assert largest.name in text
    eager = next(line for line in text.splitlines() if line.startswith("eager"))
    assert eager.split()[3:5] == ["1.00", "x"]
    assert f"{len([value for value in report.saved if value.num_bytes]) - 1} more" in report.to_text(rows=1)


def test_the_curve_goes_from_no_recompute_to_the_least_memory(report: MemoryReport) -> None:
    curve = report.pareto()
    sizes, flops = [point.saved_bytes for point in curve], [point.recomputed_flops for point in curve]
    assert sizes == sorted(sizes, reverse=True)
    assert flops == sorted(flops)
    assert flops[0] == 0
    assert sizes[-1] == (32 * 48 + 48 * 96 + 96 * 48) * 4  # the inputs, which cannot be recomputed


def saved(name: str, module: str, *, reason: str = "it is an input") -> SavedValue:
    sizes = {"shape": (8, 64), "dtype": "float32", "num_bytes": 2048, "exact_bytes": 2048}
    return SavedValue(name, module, "aten.addmm.default", "", **sizes, reason=reason, why_exact="", error=None)


def test_equal_blocks_share_their_rows(report: MemoryReport) -> None:
    """Of twelve equal blocks the first saves an extra value."""
    values = [saved(f"addmm_{block}", f"blocks.{block}.feedforward.down.packed") for block in reversed(range(12))]
    of_blocks = dataclasses.replace(report, saved=(*values, saved("mm", "blocks.0.residual.norms.0")), recomputed=())
    lines = of_blocks.to_text(width=100).splitlines()
    shared, alone = [line.split() for line in lines if "addmm" in line]
    assert shared[:6] == ["blocks.*.feedforward.down.packed", "addmm", "(addmm_11),", "12", "times", "8x64"]
    assert "24.6 kB" in " ".join(shared)
    assert alone[:3] == ["blocks.0.residual.norms.0", "addmm", "(mm)"]


def test_in_a_narrow_terminal_the_reasons_go_below(report: MemoryReport, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = (
        "read by mul_1, sub_3 and others; saving it costs 655.6 kB moved; recomputing it would need view_4, addmm_1"
    )
    value = saved("log_softmax_backward_data_1", "blocks.11.norm", reason=reason)
    changed = dataclasses.replace(report, saved=(value, *report.saved[1:]))
    assert any(line.endswith(f"kB  {reason}") for line in changed.to_text(width=400).splitlines())
    monkeypatch.setenv("COLUMNS", "60")
    lines = str(changed).splitlines()
    (row,) = (place for place, line in enumerate(lines) if "(log_softmax_backward_data_1)" in line)
    below = lines[row + 1 : row + 3]
    assert all(line.startswith("    ") and len(line) <= 60 for line in below)
    assert " ".join(" ".join(below).split()) == reason
