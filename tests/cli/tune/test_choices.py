import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fuselayers import build, ops
from fuselayers.cli.bench.cases import OpCase
from fuselayers.cli.tune import choices
from fuselayers.cli.tune.choices import Row, frozen, tune_model, tune_ops
from fuselayers.cli.tune.turns import Ratio
from fuselayers.ops.implementations import choice
from fuselayers.partition import auto, auto_file, fuse, patience
from fuselayers.partition.backends import why_unavailable
from tests.cli.tune.conftest import TINY
from tests.partition.measured import eager_for_inductor

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FUSELAYERS_CACHE", str(tmp_path))
    monkeypatch.setattr(choices, "in_turns", lambda eager, auto, device: Ratio(1.0, 0.9, 1.1))
    torch.compiler.reset()


@pytest.mark.slow
def test_a_model_is_tuned_in_both_uses_and_its_choice_is_kept() -> None:
    rows = tune_model(TINY, batch_size=2, device=CPU, keep=True, say=print)
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


def test_the_frozen_choice_serves_the_same_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    eager_for_inductor(monkeypatch)
    monkeypatch.setattr(auto, "seconds_of", lambda *_, **__: {"inductor": 2.0, "eager": 2.0, "unfused": 1.0})
    rows = tune_model(TINY, batch_size=2, device=CPU, keep=False, say=print)
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
    rows = tune_model([*TINY, "fusion.scope=block"], batch_size=2, device=CPU, keep=False, say=print)
    assert {row.function.split("(")[0] for row in rows if row.identity} == {"TransformerBlock"}


class AsCalled:
    """Tunes functions that "auto" measures to take the seconds that are given. Called one after the other, they are by
    the ratio faster than eager that is given for what serves them.

    Attributes:
        served: which candidates served each time that the whole was timed.
        beside: what is called after them, not fused.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        seconds: dict[Callable[..., Tensor], dict[str, float]],
        ratios: dict[tuple[str, ...], float],
        size: int = 8,
        **options: Any,
    ) -> None:
        self.served: list[tuple[str, ...]] = []
        self.beside: Callable[[Tensor], Tensor] | None = None
        self._seconds, self._options = seconds, options
        self._fused: list[Any] = []
        self._arguments = [torch.randn(size, requires_grad=True) for _ in seconds]

        def in_turns(eager: object, auto: object, device: torch.device) -> Ratio:
            self.served.append(tuple(name for one in self._fused for name in one.served_by))
            return Ratio(ratios[self.served[-1]], 0.25, 2.0)

        eager_for_inductor(monkeypatch)
        waiting = iter(seconds.values())
        monkeypatch.setattr(auto, "seconds_of", lambda candidates, inputs, **_: next(waiting))
        monkeypatch.setattr(choices, "in_turns", in_turns)

    def _steps(self, use: str) -> tuple[Callable[[], None], Callable[[], None]]:
        self._fused = [fuse(function, **self._options) for function in self._seconds]

        def step() -> None:
            with torch.set_grad_enabled(use == "training"):
                for one, argument in zip(self._fused, self._arguments, strict=True):
                    one(argument)
                if self.beside is not None:
                    self.beside(self._arguments[0])

        return step, step

    def tuned(self, use: str) -> tuple[Row, list[Row]]:
        return choices._tuned("whole", use, self._steps, device=CPU, keep=True)

    def in_a_later_process(self, use: str) -> list[tuple[str, str]]:
        """What serves there, and why."""
        torch.compiler.reset()
        with patience(0):
            self._steps(use)[1]()
        return [(graph.served_by, graph.reason) for one in self._fused for graph in one.report().graphs]


def wave(x: Tensor) -> Tensor:
    return x.sin() * x.cos()


def bell(x: Tensor) -> Tensor:
    return (-x * x).exp()


def normed(x: Tensor) -> Tensor:
    return ops.rms_norm(x, weight=torch.ones_like(x))


def noise(x: Tensor) -> Tensor:
    return x * torch.rand_like(x)


def test_a_choice_that_is_not_slower_than_eager_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    called = AsCalled(monkeypatch, {wave: {"inductor": 0.5, "eager": 1.2, "unfused": 0.9}}, {("inductor",): 0.98})
    whole, (part,) = called.tuned("training")
    assert called.served == [("inductor",)]
    assert (whole.ratio, part.chosen) == (Ratio(0.98, 0.25, 2.0), "inductor")
    assert part.seconds == {"inductor": 0.5, "eager": 1.2, "unfused": 0.9}


@pytest.mark.parametrize(
    ("use", "alone", "called", "best"),
    [
        # By itself a backend was the fastest; called as it will be, the function is.
        ("training", (0.5, 0.6, 0.9), {"inductor": 0.7, "eager": 0.75, "unfused": 1.0}, "unfused"),
        # By itself the function was; as it is called, another is, though by less than what was a tie before.
        ("forward", (0.95, 0.95, 0.9), {"inductor": 0.98, "eager": 0.9, "unfused": 0.975}, "inductor"),
        ("training", (0.95, 0.95, 0.9), {"inductor": 0.97, "eager": 0.98, "unfused": 0.975}, "eager"),
        # Ties go to what keeps less, and without a backward to the function as it is.
        ("training", (0.9, 0.5, 0.9), {"inductor": 0.985, "eager": 0.9, "unfused": 1.0}, "inductor"),
        ("forward", (0.5, 0.9, 0.9), {"inductor": 0.9, "eager": 1.0, "unfused": 0.985}, "unfused"),
        # But not to what is slower than eager.
        ("training", (0.9, 0.5, 0.9), {"inductor": 0.975, "eager": 0.9, "unfused": 0.99}, "unfused"),
        # Where all are slower, to the least slow, with ties as ever.
        ("training", (0.9, 0.5, 0.9), {"inductor": 0.93, "eager": 0.9, "unfused": 0.95}, "unfused"),
        ("training", (0.9, 0.5, 0.9), {"inductor": 0.94, "eager": 0.9, "unfused": 0.95}, "inductor"),
    ],
)
def test_what_is_slower_than_eager_is_chosen_again_as_it_is_called(
    use: str, alone: tuple[float, float, float], called: dict[str, float], best: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inductor, eager, unfused = alone
    seconds = {"inductor": inductor, "eager": eager, "unfused": unfused}
    clock = AsCalled(monkeypatch, {wave: seconds}, {(name,): ratio for name, ratio in called.items()})
    whole, (part,) = clock.tuned(use)
    assert sorted(clock.served[1:-1]) == [("eager",), ("inductor",), ("unfused",)]
    assert (clock.served[-1], part.chosen, whole.chosen) == ((best,), best, best)
    assert whole.ratio == Ratio(called[best], 0.25, 2.0)
    assert part.seconds == {name: unfused / ratio for name, ratio in called.items()}
    assert (part.again, whole.again) == (True, True)
    assert clock.in_a_later_process(use) == [(best, "measured before")]


def test_a_choice_that_stays_is_not_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or whoever reads a bad figure would get another one. A tie is no reason to choose again."""
    seconds = {"inductor": 1.2, "eager": 0.5, "unfused": 0.9}
    called = AsCalled(monkeypatch, {wave: seconds}, {("inductor",): 0.9, ("eager",): 0.9, ("unfused",): 0.91})
    whole, (part,) = called.tuned("training")
    assert called.served == [("eager",), ("eager",), ("inductor",), ("unfused",)]
    assert (whole.ratio, part.seconds) == (Ratio(0.9, 0.25, 2.0), seconds)
    assert (part.again, whole.again) == (False, False)
    assert called.in_a_later_process("training") == [("eager", "measured before")]


def test_where_nothing_was_measured_nothing_is_chosen_again(monkeypatch: pytest.MonkeyPatch) -> None:
    called = AsCalled(monkeypatch, {noise: {}}, {("inductor",): 0.5}, torch_random=True)
    whole, parts = called.tuned("training")
    assert (called.served, parts) == ([("inductor",)], [])
    assert (whole.ratio, whole.chosen) == (Ratio(0.5, 0.25, 2.0), "not measured")


@pytest.mark.parametrize(
    ("mixed", "chosen"), [(0.9, ["inductor", "unfused"]), (0.85, ["eager", "eager"]), (0.875, ["inductor", "unfused"])]
)
def test_of_several_graphs_each_has_its_share(mixed: float, chosen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {
        wave: {"inductor": 0.5, "eager": 1.2, "unfused": 1.0},
        bell: {"inductor": 0.5, "eager": 1.2, "unfused": 0.2},
    }
    ratios = {("inductor", "unfused"): mixed, ("inductor",) * 2: 0.5, ("eager",) * 2: 0.875, ("unfused",) * 2: 0.8}
    called = AsCalled(monkeypatch, seconds, ratios)
    whole, parts = called.tuned("training")
    assert [part.chosen for part in parts] == chosen
    assert whole.chosen == ", ".join(sorted({*chosen}))
    assert whole.ratio == Ratio(ratios[chosen[0], chosen[1]], 0.25, 2.0)
    assert called.in_a_later_process("training") == [(name, "measured before") for name in chosen]
    if chosen == ["eager", "eager"]:
        assert [dict(part.seconds) for part in parts] == [
            {"inductor": plain / 0.5, "eager": plain / 0.875, "unfused": plain / 0.8} for plain in (1.0, 0.2)
        ]
    else:
        assert [dict(part.seconds) for part in parts] == list(seconds.values())


def test_a_candidate_that_does_not_work_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    called = AsCalled(monkeypatch, {wave: {"eager": 0.5, "unfused": 1.0}}, {("unfused",): 0.9, ("eager",): 0.8})
    _, (part,) = called.tuned("training")
    assert called.served == [("eager",), ("eager",), ("unfused",), ("unfused",)]
    (machine,) = json.loads(auto_file().read_text()).values()
    assert list(machine.values()) == [{"unfused": 1.0 / 0.9, "inductor": None, "eager": 1.0 / 0.8}]
    assert part.seconds == {"unfused": 1.0 / 0.9, "eager": 1.0 / 0.8}


@pytest.mark.parametrize("best", ["inductor", ""])
def test_where_a_candidate_does_not_work_the_choice_before_serves(best: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waves, bells = {"inductor": 1.5, "eager": 0.5, "unfused": 1.0}, {"eager": 0.5, "unfused": 1.0}
    ratios = {("eager",) * 2: 0.9, ("inductor", "eager"): 1.0 if best else 0.8, ("unfused",) * 2: 0.8}
    called = AsCalled(monkeypatch, {wave: waves, bell: bells}, ratios)
    whole, (first, second) = called.tuned("training")
    # The choice as it was is another name of "eager" here, and not read twice.
    tried = [("eager",) * 2, ("eager",) * 2, ("inductor", "eager"), ("unfused",) * 2]
    assert called.served == [*tried, *([("inductor", "eager")] if best else [])]
    assert first.seconds == ({"inductor": 1.0, "eager": 1.0 / 0.9, "unfused": 1.0 / 0.8} if best else waves)
    assert second.seconds == bells
    assert (first.again, second.again, whole.again) == (bool(best), False, bool(best))


@pytest.mark.parametrize(("use", "chosen"), [("training", ["eager", "inductor"]), ("forward", ["unfused"] * 2)])
def test_ties_do_not_hang_on_which_graph_comes_first(
    use: str, chosen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {bell: {"eager": 0.5, "unfused": 1.0}, wave: {"inductor": 1.5, "eager": 0.5, "unfused": 1.0}}
    ratios = {("eager",) * 2: 0.9, ("eager", "inductor"): 1.0, ("unfused",) * 2: 1.0}
    _, parts = AsCalled(monkeypatch, seconds, ratios).tuned(use)
    assert [part.chosen for part in parts] == chosen


def test_a_graph_with_sizes_that_change_keeps_its_two_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"inductor": 0.5, "unfused": 1.0}
    called = AsCalled(monkeypatch, {wave: seconds}, {("inductor",): 0.9, ("unfused",): 1.0}, dynamic=True)
    _, (part,) = called.tuned("training")
    assert called.served == [("inductor",), ("inductor",), ("unfused",), ("unfused",)]
    assert part.seconds == {"inductor": 1.0 / 0.9, "unfused": 1.0}
    assert called.in_a_later_process("training") == [("unfused", "measured")]


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize(
    ("alone", "called", "chosen"),
    [
        ({"inductor": 0.5, "eager": 1.2, "unfused": 0.9}, (0.9, 0.7, 0.8), "inductor"),
        ({"inductor": 0.5, "eager": 1.2, "unfused": 0.9}, (0.9, 1.0, 0.8), "eager"),
        ({"inductor": 0.5, "eager": 1.2, "unfused": 0.9}, (0.9, 0.8, 1.0), "unfused"),
        ({"inductor": 0.95, "eager": 1.2, "unfused": 0.9}, (1.0, 0.8, 0.9), "inductor"),
        ({"inductor": 0.95, "eager": 1.2, "unfused": 0.9}, (0.8, 0.8, 0.9), "unfused"),
    ],
)
def test_ops_that_run_by_themselves_are_parts(
    alone: dict[str, float],
    called: tuple[float, float, float],
    chosen: str,
    beside: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those within a graph only where it is unfused, those beside it always."""
    monkeypatch.setattr(choice, "seconds_of", lambda candidates, inputs, **_: {"eager": 1.0, "inductor": 2.0})
    ratios = {(name,): ratio for name, ratio in zip(("inductor", "eager", "unfused"), called, strict=True)}
    clock = AsCalled(monkeypatch, {normed: alone}, ratios, size=1 << 16)
    if beside:
        clock.beside = lambda x: normed(x.repeat(2))
    whole, (graph, *parts) = clock.tuned("training")
    assert graph.chosen == whole.chosen == chosen
    expected = ["131072"] * beside + ["65536"] * (chosen == "unfused")
    assert sorted(part.function.split("+x")[1].split()[0] for part in parts) == expected


def test_a_model_has_the_choice_that_was_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # The backend that compiles nothing is enough here.
    monkeypatch.setattr(sys.modules[why_unavailable.__module__], "AUTO_ORDER", ("eager",))
    monkeypatch.setattr(auto, "CANDIDATES", ("eager",))
    monkeypatch.setattr(auto, "seconds_of", lambda candidates, inputs, **_: {"eager": 0.5, "unfused": 0.9})
    # In both uses: what was chosen, twice, the other one, and that again, since it is chosen.
    timed = iter([0.5, 0.5, 1.0, 1.125] * 2)
    left = timed.__length_hint__
    monkeypatch.setattr(choices, "in_turns", lambda eager, auto, device: Ratio(next(timed), 0.25, 2.0))
    # What was measured so far, each time that something is said.
    said: list[tuple[Row, int]] = []
    rows = tune_model(TINY, batch_size=2, device=CPU, keep=False, say=lambda row: said.append((row, 8 - left())))
    assert [(row.chosen, row.again) for row in rows] == [("unfused", True)] * 4
    assert said == [(rows[1], 4), (rows[3], 8)]
    assert [row.ratio.median for row in rows if row.ratio] == [1.125] * 2
    assert frozen(rows).count(":unfused") == 2


@pytest.mark.slow
def test_every_op_has_a_row_in_both_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    some = {name: choices.OPS[name] for name in ("rms_norm", "activate")}
    monkeypatch.setattr(choices, "OPS", some)
    rows = tune_ops([(2, 3, 16), (2, 5, 16)], dtype=torch.float32, dropout=0.1, device=CPU, keep=False, say=print)
    assert [(row.function, row.use) for row in rows] == [
        (f"{name} {size}", use) for size in ("2x3x16", "2x5x16") for name in some for use in ("training", "forward")
    ]
    assert all(row.ratio and row.chosen in row.seconds for row in rows)
    # The second shape is no first one with sizes that change, for which fewer are measured.
    assert all(set(row.seconds) == {"inductor", "eager", "unfused"} for row in rows)
    assert not any(row.again for row in rows)


def test_an_op_has_the_choice_that_was_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    eager_for_inductor(monkeypatch)
    monkeypatch.setattr(choices, "OPS", {"activate": choices.OPS["activate"]})
    monkeypatch.setattr(auto, "seconds_of", lambda candidates, inputs, **_: {"eager": 0.5, "unfused": 0.9})
    # What was chosen, twice, the function as it is, and that again; in forward alone nothing is chosen again.
    timed = iter([0.5, 0.5, 1.0, 1.125, 1.0])
    left = timed.__length_hint__
    monkeypatch.setattr(choices, "in_turns", lambda eager, auto, device: Ratio(next(timed), 0.25, 2.0))
    said: list[tuple[Row, int]] = []
    rows = tune_ops(
        [(2, 3, 16)],
        dtype=torch.float32,
        dropout=0.1,
        device=CPU,
        keep=False,
        say=lambda row: said.append((row, 5 - left())),
    )
    assert [(row.chosen, row.again) for row in rows] == [("unfused", True), ("eager", False)]
    assert [row.ratio.median for row in rows if row.ratio] == [1.125, 1.0]
    assert said == [(rows[0], 4), (rows[1], 5)]


def test_an_op_is_called_by_position_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []

    def op(x: Tensor, scale: float, *, shift: float, backend: str = "auto") -> Tensor:
        return x * scale + shift

    @functools.wraps(op)
    def watched(*args: Any, **kwargs: Any) -> Tensor:
        called.append((args[1:], kwargs))
        return op(*args, **kwargs)

    monkeypatch.setattr(choices, "fuse", lambda function, static_argnames: function)
    eager, auto = choices._op_steps(OpCase(watched, op, {"x": torch.ones(2)}, {"shift": 1.0, "scale": 2.0}), "forward")
    eager()
    auto()
    assert called == [((2.0,), {"shift": 1.0, "backend": "eager"}), ((2.0,), {"shift": 1.0})]


def test_nothing_to_choose() -> None:
    with pytest.raises(
        ValueError, match=r"^nothing in this model is fused, so there is nothing to choose; take fusion=auto$"
    ):
        tune_model(["fusion=off"], batch_size=None, device=CPU, keep=False, say=print)


def test_frozen_names_what_differs_from_what_auto_begins_with() -> None:
    chosen = ("eager", "inductor", "unfused")
    rows = [Row("", "", {}, name, None, f"0000000{place}") for place, name in enumerate(chosen)]
    begun = "inductor" if why_unavailable("inductor", {"cpu"}) is None else "eager"
    others = "+".join(f"{row.identity}:{row.chosen}" for row in rows if row.chosen != begun)
    assert frozen(rows) == f"frozen:{begun}+{others}"
    assert frozen([]) == f"frozen:{begun}"
