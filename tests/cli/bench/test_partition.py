import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fuselayers.cli.bench import partition as bench
from fuselayers.cli.bench.layers import LAYERS, LayerCase, TransformerLayer
from fuselayers.cli.main import main

SMALL = bench.Setting(
    device=torch.device("cpu"), repeats=2, num_layers=1, depths=(1, 2), hidden_dim=128, dtypes=(torch.float32,)
)


def test_budget_rows_are_torchs_and_ours_and_ours_is_never_above() -> None:
    rows = bench.budgets(SMALL)
    assert [row["torch's budget"] for row in rows] == sorted((row["torch's budget"] for row in rows), reverse=True)
    for row in rows:
        assert row["fuse FLOPs %"] <= row["torch FLOPs %"]
        assert row["fuse units"] <= row["torch units"] + 0.01
        assert row["fuse is above"] == "no"
    assert rows[-1]["torch FLOPs %"] > rows[0]["torch FLOPs %"]


def test_speed_rows_have_ratios_of_their_own_columns() -> None:
    rows = bench.speed(SMALL)
    assert [row["layers"] for row in rows] == [1, 2]
    assert rows[1]["nodes"] > rows[0]["nodes"]
    for row in rows:
        assert 0 < row["solver"] < row["fuse"]
        assert row["torch / fuse"] == pytest.approx(row["torch"] / row["fuse"], rel=0.1)


def test_the_tutorial_saves_one_tensor() -> None:
    rows = {row["form"]: row for row in bench.tutorial(SMALL)}
    assert [rows[name]["tensors saved"] for name in ("eager", "torch.compile", "fuse")] == [2, 1, 1]
    assert rows["eager"]["forward x"] == 1.0


def test_one_thread_times_a_call_and_gives_the_threads_back() -> None:
    threads = torch.get_num_threads()
    rows = bench.overhead(bench.Setting(device=torch.device("cpu"), repeats=1))
    assert torch.get_num_threads() == threads
    assert {row["call"] for row in rows} == {"eager", "torch.compile", "fuse, inductor", "fuse, eager"}
    assert all(0 < row["us"] < 1e5 for row in rows)


def test_saved_rows_count_units_and_refuse_to_time_wrong_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(TransformerLayer):
        def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
            y_BTD = super().forward(x_BTD)
            return y_BTD * 1.5 if torch.compiler.is_compiling() else y_BTD

    monkeypatch.setattr(bench, "LAYERS", {"right": LAYERS["GPT, SDPA"], "wrong": LayerCase(Wrong, 10.0)})
    rows = bench.saved(SMALL)
    assert [row["wrong"] for row in rows] == ["", "torch.compile, fuse"]
    assert rows[1]["step / eager"] == "-"
    right = rows[0]
    assert right["fuse"] <= right["target"] + 0.1  # and the logarithms of attention's sums, 4 / 64 of a unit
    assert right["fuse"] < right["torch.compile"] < right["eager"]
    assert right["matmuls again"] == 0
    assert right["step / eager"] > 0


def measured(section: str) -> Any:
    return lambda setting: [{"layer": section, "wrong": "", "depths": str(setting.depths)}]


def test_the_command_runs_what_is_asked_for_and_writes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = {name: (title, measured(name)) for name, (title, _) in bench.SECTIONS.items()}
    monkeypatch.setattr("fuselayers.cli.bench.command.SECTIONS", fake)
    file = tmp_path / "partition.json"
    assert main(["bench", "partition", "--only", "speed,saved", "--quick", "--json", str(file)]) == 0
    content = json.loads(file.read_text())
    assert list(content["sections"]) == ["speed", "saved"]
    assert content["sections"]["speed"][0]["depths"] == "(6, 12)"
    assert f"torch {torch.__version__}" in content["machine"]
    assert fake["speed"][0] in capsys.readouterr().out


def test_a_budget_above_torchs_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"torch's budget": 0.5, "fuse is above": "yes"}]
    monkeypatch.setattr("fuselayers.cli.bench.command.SECTIONS", {"budget": ("curve", lambda setting: rows)})
    assert main(["bench", "partition"]) == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["partition", "--only", "sped"], "no section of bench partition 'sped'; did you mean 'speed'?"),
        (["partition", "gpt_nano"], "bench partition takes no name; see its --only and --quick"),
        (["partition", "--shape", "8x8", "--dropout", "0.1"], "bench partition takes no shape and no dropout; see its"),
        (["op"], "bench op needs a NAME; see fuselayers bench --help"),
    ],
)
def test_bad_input_in_one_line(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    assert f"fuselayers: {text}" in capsys.readouterr().err


def test_layers_are_modules_of_plain_torch() -> None:
    for case in LAYERS.values():
        layer = case.make(64, 4, dropout=0.0)
        assert {type(part).__module__.partition(".")[0] for part in layer.modules() if part is not layer} == {"torch"}
        assert isinstance(layer, nn.Module)
