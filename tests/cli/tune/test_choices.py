import json
from pathlib import Path

import pytest
import torch

from fuselayers import build
from fuselayers.cli.tune import choices
from fuselayers.cli.tune.choices import Tuned, pinned, tune_model
from fuselayers.partition import auto, auto_file
from fuselayers.partition.auto import fastest
from fuselayers.partition.report import identity_of
from tests.cli.tune.conftest import TINY
from tests.partition.measured import eager_for_inductor

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FUSELAYERS_CACHE", str(tmp_path))
    monkeypatch.setattr(choices, "_ROUNDS", 3)
    torch.compiler.reset()


@pytest.mark.slow
def test_a_model_is_tuned_in_both_uses_and_the_times_are_stored() -> None:
    said: list[Tuned] = []
    tuned = tune_model(TINY, batch_size=2, device=CPU, keep=True, say=said.append)
    assert said == tuned
    assert [one.use for one in tuned] == ["training", "forward"]
    for one in tuned:
        assert one.eager > 0 < one.fused
        ((name, seconds),) = one.graphs.items()
        assert f") {one.use} [" in name
        assert set(seconds) == {"inductor", "eager", "plain"}
    (machine,) = json.loads(auto_file().read_text()).values()
    assert machine == {name: seconds for one in tuned for name, seconds in one.graphs.items()}


@pytest.mark.parametrize(
    "best", [*(pytest.param(one, marks=pytest.mark.slow) for one in ("inductor", "plain")), "eager"]
)
def test_the_pinned_choice_serves_the_same_graphs(best: str, monkeypatch: pytest.MonkeyPatch) -> None:
    eager_for_inductor(monkeypatch)
    seconds = {"inductor": 2.0, "eager": 2.0, "plain": 2.0, best: 1.0}
    monkeypatch.setattr(auto, "seconds_of", lambda *_, **__: seconds)
    tuned = tune_model(TINY, batch_size=2, device=CPU, keep=False, say=print)
    assert not auto_file().exists()
    torch.compiler.reset()
    model = build("gpt_nano", [*TINY, f"fusion.backend={pinned(tuned)}"])
    inputs = model.example_inputs(2, device="cpu")  # type: ignore[operator]
    model(*inputs).backward()
    (graph,) = model.report().graphs  # type: ignore[operator]
    ((name, found),) = tuned[0].graphs.items()
    assert fastest(found) == best
    assert (graph.identity, graph.served_by, graph.reason) == (identity_of(name), best, "pinned")


@pytest.mark.slow
def test_times_of_an_earlier_run_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    eager_for_inductor(monkeypatch)
    for best in ("eager", "plain"):
        seconds = {"inductor": 2.0, "eager": 2.0, "plain": 2.0, best: 1.0}
        monkeypatch.setattr(auto, "seconds_of", lambda *_, **__: seconds)  # noqa: B023
        tuned = tune_model(TINY, batch_size=2, device=CPU, keep=True, say=print)
        assert [fastest(one) for use in tuned for one in use.graphs.values()] == [best, best]


def test_a_model_without_example_inputs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from fuselayers.components.model.stack import Stack

    monkeypatch.delattr(Stack, "example_inputs")
    with pytest.raises(ValueError, match=r"^model 'decoder' does not say what it is called with; give Dec"):
        tune_model(TINY, batch_size=2, device=CPU, keep=False, say=print)
