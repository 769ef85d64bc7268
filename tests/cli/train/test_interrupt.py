import signal

import pytest

from fuselayers.cli.train.interrupt import noted_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_noted_and_the_second_stops_at_once(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with noted_signals() as noted:
        assert noted == []
        signal.raise_signal(number)
        assert noted == [number]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(number) is before


def test_signals_that_come_twice_stop_nothing_in_the_middle() -> None:
    with noted_signals(second_stops=False) as noted:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(number)
        assert noted[0] == signal.SIGTERM


def test_a_terminal_that_closes_may_say_so_twice_and_others_after_it(hangup: None) -> None:
    with noted_signals() as noted:
        for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM):
            signal.raise_signal(number)
        assert noted[0] == signal.SIGHUP
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


def test_under_nohup_a_closed_terminal_stops_nothing() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with noted_signals() as noted:
            signal.raise_signal(signal.SIGHUP)
            assert noted == []
    finally:
        signal.signal(signal.SIGHUP, before)
