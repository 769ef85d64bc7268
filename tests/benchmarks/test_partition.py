import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fuselayers
from benchmarks import partition as bench
from benchmarks.layers import LAYERS, LayerCase

CPU = torch.device("cpu")
UNIT = 4 * 128 * 256 * 4


class Sines(nn.Module):
    """y = sin sin (w x). Eager keeps x, w x and sin(w x); one of them is enough."""

    def __init__(self, hidden_dim: int, num_heads: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_dim))

    def forward(self, x_BTD: Tensor) -> Tensor:
        return (self.weight * x_BTD).sin().sin()


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
def test_a_unit_is_a_tensor_of_the_layers_size_and_parameters_do_not_count(dtype: torch.dtype) -> None:
    kept = bench.units(LayerCase(Sines, 1.0), dtype=dtype, device=CPU)
    assert kept["eager"] == 3.0
    if dtype == torch.float32:
        assert (kept["torch.compile"], kept["fuse"]) == (1.0, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_no_layer_keeps_more_than_its_target_and_rows_of_numbers_beside_it(name: str) -> None:
    kept = bench.units(LAYERS[name], dtype=torch.float32, device=CPU)
    # A number per token and head is 1/64 unit, one per token 1/256, a rotary table 1/16; no whole tensor fits.
    assert kept["fuse"] <= LAYERS[name].target + 0.1
    assert kept["fuse"] < kept["torch.compile"] < kept["eager"]
    assert bench.matmuls_again(LAYERS[name], dtype=torch.float32, device=CPU) == 0
    if name == "GPT, SDPA":
        # By hand: x, q with k and v, what attention returns, the sum after it, the MLP's inside. Beside them there are
        # the logarithms of attention's sums, of 4 heads, and the seeds of two masks.
        assert kept["fuse"] * UNIT == (1 + 3 + 1 + 1 + 4) * UNIT + 4 * 4 * 128 * 4 + 2 * 8


@pytest.mark.slow
def test_budget_rows_are_torchs_and_ours_and_ours_is_never_above() -> None:
    rows = bench.budgets(num_layers=1)
    assert [row["torch's budget"] for row in rows] == sorted((row["torch's budget"] for row in rows), reverse=True)
    for row in rows:
        assert row["fuse FLOPs %"] <= row["torch FLOPs %"]
        assert row["fuse units"] <= row["torch units"] + 0.01
        assert row["lower"] in ("fuse", "same")
        assert row["lower"] == "fuse" or row["fuse FLOPs %"] == row["torch FLOPs %"]
    assert rows[-1]["torch FLOPs %"] > rows[0]["torch FLOPs %"]
    below = sum(row["lower"] == "fuse" for row in rows)
    assert bench.budget_note(rows) == f"No point of fuse lies above torch's curve; {below} of {len(rows)} lie below."


def test_the_command_prints_and_writes_both_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = {"layer": "GPT", "dtype": "float32", "wrong": ""}
    monkeypatch.setattr(bench, "saved", lambda device, *, repeats: [layer])
    monkeypatch.setattr(bench, "budgets", lambda: [{"torch's budget": 0.5, "lower": "fuse"}])
    file = tmp_path / "partition.json"
    assert bench.main(["--device", "cpu", "--json", str(file)]) == 0
    content = json.loads(file.read_text())
    assert content["sections"]["saved"] == [layer]
    assert content["repeats"] == 50
    assert f"torch {torch.__version__}" in content["machine"]
    assert f"fuselayers {fuselayers.__version__}" in content["machine"]
    assert "No point of fuse lies above torch's curve; 1 of 1 lie below." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "lower", "text"),
    [
        ("", "torch", "fuse lies above torch's curve at torch's budget 0.5."),
        ("fuse: output 0 is off", "fuse", "not timed, the numbers are wrong: GPT float32: fuse: output 0 is off"),
    ],
)
def test_a_higher_budget_and_wrong_numbers_fail_the_command(
    wrong: str, lower: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = [{"layer": "GPT", "dtype": "float32", "wrong": wrong}]
    monkeypatch.setattr(bench, "saved", lambda device, *, repeats: layers)
    monkeypatch.setattr(bench, "budgets", lambda: [{"torch's budget": 0.5, "lower": lower}])
    assert bench.main(["--device", "cpu"]) == 1
    assert text in capsys.readouterr().out
