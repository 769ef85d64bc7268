import re

import pytest

from fuselayers.cli.plan.hardware import GPUS, hardware_called


def test_an_unknown_gpu_is_told_the_choices() -> None:
    error = "no gpu 'h10'; did you mean 'h100'? there are: a100, b200, cpu, h100, h200, mi300x"
    with pytest.raises(ValueError, match=re.escape(error)):
        hardware_called("h10")


def test_a_group_has_the_slowest_link_on_its_ring() -> None:
    h100 = GPUS["h100"]
    assert h100.group_bandwidth(8) == pytest.approx(0.8 * 450e9)
    assert h100.group_bandwidth(4, stride=2) == pytest.approx(0.8 * 450e9)  # within a node too
    assert h100.group_bandwidth(64) == pytest.approx(0.8 * 400e9)  # eight adapters of 50 GB/s
    assert h100.group_bandwidth(8, stride=8) == pytest.approx(0.8 * 50e9)  # one of each node


def test_rates_are_shares_of_the_data_sheet() -> None:
    a100 = GPUS["a100"]
    assert a100.rates("bfloat16").matmul == pytest.approx(312e12 * 0.869 * 0.78)
    assert a100.rates("float32").matmul == pytest.approx(19.5e12 * 0.869 * 0.78)
    assert a100.peak("bfloat16") == 312e12
