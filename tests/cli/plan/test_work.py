import pytest

from fuselayers.cli.plan.work import Counted, Pass, Rates, Work, seconds_of


def test_a_step_is_the_rest_and_its_layers_for_a_batch() -> None:
    one = Counted(
        fixed=Pass(saved_bytes=1.0),
        example=Pass(saved_bytes=10.0),
        layer_fixed=Pass(saved_bytes=100.0),
        layer_example=Pass(saved_bytes=1000.0, forward=Work(matmul_flops=2.0)),
    )
    step = one.step(3, num_layers=5)
    assert step.saved_bytes == 1 + 3 * 10 + 5 * (100 + 3 * 1000)
    assert step.forward.matmul_flops == 5 * 3 * 2


def test_every_term_takes_its_time() -> None:
    work, rates = Work(2.0, 3.0, 5.0, 7.0, 11.0, 13.0), Rates(2.0, 3.0, 5.0, 7.0, 11.0, 1.0)
    assert seconds_of(work, rates) == pytest.approx(5 + 13)
    assert (work - work * 0.5).flops == 2.5
