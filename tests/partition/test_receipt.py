import json

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fuselayers.partition import CostModel, Receipt, budget, explain, machine_of
from fuselayers.partition.partitioners import SavePolicy


def layer(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.gelu(x @ up).square() @ down


@pytest.fixture(scope="module")
def receipt() -> Receipt:
    shapes = (32, 48), (48, 96), (96, 48)
    return explain(layer, *[torch.randn(shape, requires_grad=True) for shape in shapes])


def test_json_holds_every_figure(receipt: Receipt) -> None:
    content = json.loads(receipt.to_json())
    assert content["subject"] == "layer"
    assert content["totals"]["this"]["saved_bytes"] == receipt.totals["this"].saved_bytes
    assert [value["name"] for value in content["saved"]] == [value.name for value in receipt.saved]
    assert content["saved"][0].keys() == {"name", "op", "source", "shape", "dtype", "num_bytes", "reason"}
    assert "graphs" not in content


def test_text_names_what_costs_most_and_sums_up_the_rest(receipt: Receipt) -> None:
    text = str(receipt)
    assert text.startswith("layer: min_cut for inductor, prices of ")
    largest = max(receipt.saved, key=lambda value: value.num_bytes)
    assert largest.name in text
    lines = text.splitlines()
    eager = next(line for line in lines if line.startswith("eager"))
    assert eager.split()[3:5] == ["1.00", "x"]
    from rich.console import Console

    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115 (closed with the process)
    receipt.print(console, most=1)
    assert f"{len([value for value in receipt.saved if value.num_bytes]) - 1} more" in console.export_text()


def test_the_curve_goes_from_no_recompute_to_the_least_memory(receipt: Receipt) -> None:
    curve = receipt.pareto(points=6)
    sizes, flops = [point.saved_bytes for point in curve], [point.recomputed_flops for point in curve]
    assert sizes == sorted(sizes, reverse=True)
    assert flops == sorted(flops)
    assert flops[0] == 0
    assert sizes[-1] == (32 * 48 + 48 * 96 + 96 * 48) * 4  # the inputs, which cannot be computed again


def test_the_curve_is_at_the_receipts_own_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    dear = CostModel(machine=machine_of("cpu"), memory_price=9.0)
    receipt = explain(torch.sin, torch.randn(8, requires_grad=True), partition=budget(1.0, cost=dear))
    used = []
    monkeypatch.setattr(SavePolicy, "saved_values", lambda rule, joint, *, fused: used.append(rule.cost) or [])
    receipt.pareto(points=2)
    assert used == [dear, dear]
    assert "cost" not in receipt.as_dict()


def test_two_explanations_of_the_same_are_equal(receipt: Receipt) -> None:
    shapes = (32, 48), (48, 96), (96, 48)
    assert explain(layer, *[torch.randn(shape, requires_grad=True) for shape in shapes]) == receipt
