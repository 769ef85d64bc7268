import signal

import pytest

from fuselayers.cli.train.interrupt import noted_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_noted_and_the_second_stops_at_once(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with noted_signals() as signals:
        assert signals == []
        signal.raise_signal(number)
        assert signals == [number]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(number) is before


def test_signals_that_come_twice_stop_nothing_in_the_middle() -> None:
    with noted_signals(second_stops=False) as signals:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(number)
        assert signals[0] == signal.SIGTERM
