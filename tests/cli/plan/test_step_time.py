import pytest

from fuselayers.cli.plan.communication import Communication, Sent
from fuselayers.cli.plan.layout import Layout
from fuselayers.cli.plan.memory import Memory
from fuselayers.cli.plan.step_time import StepTime, step_time
from fuselayers.cli.plan.work import Rates
from tests.cli.plan.conftest import TOY

RATES = Rates(matmul=1e3, attention=1e3, bandwidth=60.0, exponentials=1.0, draws=1.0, kernel_seconds=0.0)
NOTHING = Memory(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def _time(layout: Layout, communication: Communication) -> StepTime:
    return step_time(TOY, layout, communication, NOTHING, RATES, batch=1)


def _gather(seconds: float) -> tuple[Sent, ...]:
    return (Sent("all-gather", seconds * 2, 1, 2, 1.0, 0.0),)


def test_computing_is_layers_and_the_rest() -> None:
    time = _time(Layout(dp=1), Communication())
    # A layer: 4 + 1 + 1 seconds forward, 8 + 2.5 + 2 backward.
    assert (time.forward, time.backward) == (4 * 6.0 + 1, 4 * 12.5 + 2)
    assert time.exposed == time.hidden == 0
    assert _time(Layout(dp=1, checkpointing="block"), Communication()).backward == 4 * (12.5 + 6) + 2


def test_collectives_hide_behind_layers_and_what_is_left_counts() -> None:
    time = _time(Layout(dp=2), Communication(forward=_gather(20.0), backward=_gather(60.0), ends=_gather(3.0)))
    assert time.exposed == pytest.approx((60 - 50) + 3)
    assert time.hidden == pytest.approx(20 + 50)
    assert time.total == pytest.approx(25 + 52 + 13)


def test_tensor_parallelism_divides_work_and_waits_for_its_links() -> None:
    time = _time(Layout(dp=1, tp=2, sequence=True), Communication(inside=_gather(7.0)))
    assert time.forward == pytest.approx((4 * 6 + 1) / 2)
    assert time.exposed == pytest.approx(7)
    # Without sequence parallelism a third of the bytes is moved on each rank: 60 -> 20 + 40 / 2.
    assert _time(Layout(dp=1, tp=2), Communication()).forward == pytest.approx(4 * (2.5 + 40 / 60) + 0.5)
