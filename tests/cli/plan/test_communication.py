import pytest

from fuselayers.cli.plan.communication import Communication, Sent, communication_of, seconds
from fuselayers.cli.plan.hardware import GPUS
from fuselayers.cli.plan.layout import Layout
from tests.cli.plan.conftest import TOY

H100 = GPUS["h100"]


def _moved(step: Communication) -> float:
    return sum(one.moved for one in step.all)


@pytest.mark.parametrize(
    ("kind", "moved"), [("all-gather", 3 * 6.0), ("reduce-scatter", 3 * 6.0), ("all-reduce", 3 * 12.0)]
)
def test_a_ring_moves_all_but_the_own_part(kind: str, moved: float) -> None:
    sent = Sent(kind, 8.0, 3, 4, 2.0, 0.5)
    assert sent.moved == moved
    assert sent.seconds == moved / 2 + 3 * 0.5 * 2  # four ranks are two doublings
    assert Sent(kind, 8.0, 3, 1, 2.0, 0.5).seconds == 0


def test_ddp_reduces_every_gradient_once() -> None:
    step = communication_of(TOY, Layout(dp=4, shard="ddp"), H100, batch=2)
    assert _moved(step) == pytest.approx(2 * 4 * (4 * 1000 + 200) * 3 / 4)
    assert step.forward == step.inside == ()


def test_fsdp_gathers_layers_twice_and_reduces_them_once() -> None:
    step = communication_of(TOY, Layout(dp=4, shard="fsdp"), H100, batch=2)
    gathered, reduced = 2 * 4 * 1000 * 2 + 200 * 2, (4 * 1000 + 200) * 4
    assert _moved(step) == pytest.approx((gathered + reduced) * 3 / 4)
    assert [one.kind for one in step.backward] == ["all-gather", "reduce-scatter"]


def test_tensor_parallelism_reduces_the_stream_four_times_a_layer() -> None:
    stream = 2 * 40.0
    plain = communication_of(TOY, Layout(dp=1, tp=2), H100, batch=2)
    assert _moved(plain) == pytest.approx(4 * 4 * 2 * stream / 2)
    sequence = communication_of(TOY, Layout(dp=1, tp=2, sequence=True), H100, batch=2)
    # Four pairs a layer move as much, and backward gathers two inputs again.
    assert _moved(sequence) == pytest.approx(_moved(plain) + 4 * 2 * stream / 2)
    again = communication_of(TOY, Layout(dp=1, tp=2, checkpointing="block"), H100, batch=2)
    assert _moved(again) == pytest.approx(_moved(plain) * 6 / 4)


def test_eight_billion_weights_on_one_node_take_a_tenth_of_a_second() -> None:
    sent = Sent("all-gather", 16e9, 1, 8, H100.group_bandwidth(8), H100.latency)
    assert seconds((sent,)) == pytest.approx(16e9 * 7 / 8 / 360e9, rel=1e-2)
