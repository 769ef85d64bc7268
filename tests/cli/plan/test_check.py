"""The bar of the model: a step on this CPU within 25 %. Rates are measured first, so a slow machine changes both."""

import json

import pytest
from rich.console import Console

from fuselayers.cli.plan.check import Checked, checked_models, print_check
from fuselayers.configs import compose


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "overrides", "batch"),
    [
        ("gpt_nano", [], 4),
        ("llama_tiny", ["model.num_layers=3"], 2),
        ("bert_tiny", ["model.hidden_dim=128"], 4),
        ("gpt2_small", ["model.num_layers=2", "model.context_length=64"], 2),
    ],
)
def test_a_step_takes_what_is_predicted(name: str, overrides: list[str], batch: int) -> None:
    (row,) = checked_models(name, compose(name, [*overrides, "fusion=off"]), batch=batch)
    assert row.predicted_seconds == pytest.approx(row.measured_seconds, rel=0.25)


def test_the_check_is_printed_and_written(capsys: pytest.CaptureFixture[str]) -> None:
    row = Checked("gpt_nano", 2, False, 0.030, 0.025, 300.0, 200.0)
    print_check(Console(width=120), [row], as_json=False)
    assert "gpt_nano      2  eager    30.0 ms   25.0 ms   1.20  1.500 x" in capsys.readouterr().out
    print_check(Console(width=120), [row], as_json=True)
    assert json.loads(capsys.readouterr().out)["steps"][0]["measured_seconds"] == 0.025
