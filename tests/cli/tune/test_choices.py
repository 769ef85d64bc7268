import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fuselayers import build
from fuselayers.cli.tune import choices
from fuselayers.cli.tune.choices import Ratio, Row, _in_turns, frozen, tune_model, tune_ops
from fuselayers.partition import auto, auto_file
from fuselayers.partition.backends import why_unavailable
from fuselayers.partition.timings import has_choice

TINY = ["model.num_layers=1", "model.hidden_dim=16", "model.context_length=8", "attention.num_heads=2"]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FUSELAYERS_CACHE", str(tmp_path))
    monkeypatch.setattr(choices, "_in_turns", lambda eager, auto, device: Ratio(1.0, 0.9, 1.1))
    torch.compiler.reset()


def test_a_model_is_tuned_in_both_uses_and_its_choice_is_kept() -> None:
    rows = tune_model(TINY, batch_size=2, device=CPU, keep=True)
    assert [(row.function.split("(")[0], row.use) for row in rows] == [
        ("Decoder", "training"),
        ("model decoder", "training"),
        ("Decoder", "forward"),
        ("model decoder", "forward"),
    ]
    for row in rows:
        assert (row.ratio is None) is (row.identity != "")
        assert set(row.seconds) == ({"inductor", "eager", "unfused"} if row.identity else set())
    (machine,) = json.loads(auto_file().read_text()).values()
    kept = {label[-9:-1]: seconds for label, seconds in machine.items()}
    assert kept == {row.identity: row.seconds for row in rows if row.identity}


def test_the_frozen_choice_serves_the_same_graphs() -> None:
    rows = tune_model(TINY, batch_size=2, device=CPU, keep=False)
    assert not auto_file().exists()
    torch.compiler.reset()
    model = build("gpt_nano", [*TINY, f"fusion.backend={frozen(rows)}"])
    inputs = model.example_inputs(2, device="cpu")  # type: ignore[operator]
    model(*inputs).backward()
    (graph,) = model.report().graphs  # type: ignore[operator]
    (training,) = (row for row in rows if row.identity and row.use == "training")
    assert (graph.identity, graph.served_by, graph.reason) == (training.identity, training.chosen, "frozen")


@pytest.mark.slow
def test_blocks_are_chosen_for_each_by_itself() -> None:
    rows = tune_model([*TINY, "fusion.scope=block"], batch_size=2, device=CPU, keep=False)
    assert {row.function.split("(")[0] for row in rows if row.identity} == {"TransformerBlock"}


def test_what_loses_against_eager_as_it_is_called_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself a backend was the fastest; called as it will be, eager is."""
    timed = iter([Ratio(0.5, 0.4, 0.6), Ratio(1.0, 0.9, 1.2)] * 2)
    monkeypatch.setattr(choices, "_in_turns", lambda eager, auto, device: next(timed))
    said = {"inductor": 0.5, "eager": 1.2, "unfused": 0.9}
    monkeypatch.setattr(auto, "seconds_of", lambda candidates, inputs, **_: said)
    rows = tune_model(TINY, batch_size=2, device=CPU, keep=True)
    assert [row.chosen for row in rows if row.identity] == ["unfused", "unfused"]
    assert [row.seconds for row in rows if row.identity] == [{"inductor": 1.8, "eager": 1.2, "unfused": 0.9}] * 2
    assert [row.ratio for row in rows if row.ratio] == [Ratio(1.0, 0.9, 1.2)] * 2


def test_what_lost_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other is the fastest by itself, and barely loses as it is called."""
    timed = iter([*[Ratio(0.979, 0.9, 1.0)] * 2, Ratio(1.0, 0.9, 1.2)] * 2)
    monkeypatch.setattr(choices, "_in_turns", lambda eager, auto, device: next(timed))
    said = {"inductor": 0.5, "eager": 0.6, "unfused": 0.9}
    monkeypatch.setattr(auto, "seconds_of", lambda candidates, inputs, **_: said)
    rows = tune_model(TINY, batch_size=2, device=CPU, keep=False)
    assert [row.chosen for row in rows if row.identity] == ["unfused", "unfused"]
    assert next(timed, None) is None


def test_every_op_has_a_row_in_both_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    some = {name: choices.OPS[name] for name in ("rms_norm", "activate")}
    monkeypatch.setattr(choices, "OPS", some)
    rows = tune_ops([(2, 3, 16)], dtype=torch.float32, dropout=0.1, device=CPU, keep=False)
    assert [(row.function, row.use) for row in rows] == [
        (f"{name} 2x3x16", use) for name in some for use in ("training", "forward")
    ]
    assert all(row.ratio and row.chosen in row.seconds for row in rows)


def test_nothing_to_choose() -> None:
    with pytest.raises(
        ValueError, match=r"^nothing in this model is fused, so there is nothing to choose; take fusion=auto$"
    ):
        tune_model(["fusion=off"], batch_size=None, device=CPU, keep=False)


def test_frozen_names_what_differs_from_what_auto_begins_with() -> None:
    chosen = ("eager", "inductor", "unfused")
    rows = [Row("", "", {}, name, None, f"0000000{place}") for place, name in enumerate(chosen)]
    begun = "inductor" if why_unavailable("inductor", {"cpu"}) is None else "eager"
    others = "+".join(f"{row.identity}:{row.chosen}" for row in rows if row.chosen != begun)
    assert frozen(rows) == f"frozen:{begun}+{others}"
    assert frozen([]) == f"frozen:{begun}"


def test_both_are_timed_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "_ENOUGH_SECONDS", 0.0)
    calls = []

    def step(name: str, seconds: float) -> None:
        calls.append((name, has_choice()))
        time.sleep(seconds)

    ratio = _in_turns(lambda: step("eager", 0.01), lambda: step("auto", 0.002), CPU)
    assert 1 < ratio.low <= ratio.median <= ratio.high < 6
    turns = list(zip(calls[::2], calls[1::2], strict=True))
    assert len(turns) == 31
    assert all({name for name, _ in turn} == {"eager", "auto"} for turn in turns)
    # Eager's own ops stay formulas.
    assert set(calls) == {("eager", False), ("auto", True)}


@pytest.mark.parametrize(("seconds", "rounds"), [(1e-4, 2001), (0.01, 150), (0.5, 31), (2.0, 15), (9.0, 11)])
def test_long_steps_are_timed_less_often(monkeypatch: pytest.MonkeyPatch, seconds: float, rounds: int) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(choices, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    calls = []

    def step(name: str) -> None:
        calls.append(name)
        clock.now += seconds

    _in_turns(lambda: step("eager"), lambda: step("auto"), CPU)
    assert calls.count("eager") == calls.count("auto") == pytest.approx(rounds, abs=1)
