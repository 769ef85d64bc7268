import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fuselayers.cli.main import main
from fuselayers.partition import MemoryReport, explain
from tests.cli.conftest import TINY_MODEL

MODEL = ("model=gpt_nano", *TINY_MODEL)


def explain_a_sine(*_: object, **options: Any) -> MemoryReport:
    """Explain a sine in place of a model, which takes seconds to trace."""
    return explain(torch.sin, torch.ones(8, requires_grad=True), **options)


def test_prints_totals_and_writes_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    assert main(["explain", *MODEL, "--batch", "2x16", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Decoder: min_cut for inductor")
    content = json.loads(file.read_text())
    totals = {rule: figures["saved_bytes"] for rule, figures in content["totals"].items()}
    assert totals["this"] < totals["torch min_cut"]
    assert totals["this"] < totals["eager"]
    assert content["totals"]["this"]["recomputed_flops"] == 0
    assert f"written: {file}" in " ".join(out.split())


@pytest.mark.slow
def test_shows_what_compression_does(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    asked = ["gpt_nano", "model.num_layers=1", "fusion.compress=int8", "--batch", "2x64", "--backend", "eager"]
    assert main(["explain", *asked, "--json", str(tmp_path / "report.json")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Decoder: min_cut in int8 for eager")
    assert "int8: error of gradients, relative to exact: median 0." in out
    content = json.loads((tmp_path / "report.json").read_text())
    assert 0 < content["gradient_errors"]["blocks.0.feedforward.down.weight"] < 0.03
    errors = [value["error"] for value in content["saved"] if value["why_exact"] is None]
    assert 0 < min(errors) < 1e-4, "queries and keys, in int16"
    assert 0.001 < max(errors) < 0.03


@pytest.mark.slow
@pytest.mark.parametrize(("text", "limit"), [("budget:0.3", 0.3), ("budget:20000", 20_000)])
def test_a_budget_is_kept(text: str, limit: float, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    assert main(["explain", *MODEL, "--batch", "2x16", "--partition", text, "--json", str(file)]) == 0
    totals = json.loads(file.read_text())["totals"]
    most = limit * totals["default"]["saved_bytes"] if limit < 1 else limit
    assert totals["this"]["saved_bytes"] <= most
    assert totals["this"]["recomputed_flops"] > 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--batch", "2x17"], "--batch must be sequences x tokens, with at most 16 tokens, got 2x17"),
        (["--batch", "some"], "--batch must be sizes above 0 with x between them, such as 4x128, got 'some'"),
        (["--partition", "budget:5"], "this graph needs more than 5 bytes saved for backward: the smallest "),
        (["norm=rmsnorm"], "no norm 'rmsnorm'; did you mean 'rms_norm'?"),
    ],
)
def test_bad_input_in_one_line(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fuselayers.cli.explain.explain", explain_a_sine)
    assert main(["explain", *MODEL, *arguments]) == 2
    assert f"fuselayers: {text}" in capsys.readouterr().err
