from pathlib import Path

import pytest
import torch

from fuselayers.cli.main import main
from fuselayers.cli.tune import prices
from fuselayers.partition import machine_of


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FUSELAYERS_CACHE", str(tmp_path))
    monkeypatch.setattr(prices, "SIZES_ON_A_CPU", (1 << 18, 128))


def test_what_is_measured_is_stored_and_used_and_of_this_world(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = machine_of("cpu")
    assert before.name.startswith("stated: ")
    assert main(["tune", "--device", "cpu"]) == 0
    after = machine_of("cpu")
    assert after.name.startswith("measured: ")
    assert f"torch {torch.__version__}" in after.name
    assert str(tmp_path / "machines.json") in capsys.readouterr().out.replace("\n", "")
    assert 1e8 < after.bandwidth < 1e13
    assert 1e8 < after.flop_rate < 1e15
    assert 1e8 < after.vector_flop_rate < 1e14
    assert 1e-8 < after.kernel_seconds < 1e-3


def test_a_broken_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "machines.json").write_text("{")
    with pytest.warns(UserWarning, match=r"machines\.json was not written by fuselayers"):
        assert main(["tune", "--device", "cpu"]) == 0
    assert machine_of("cpu").name.startswith("measured: ")
