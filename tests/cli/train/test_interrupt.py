import signal
import threading

import pytest

from fuselayers.cli.train.interrupt import Interrupt


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_noted_and_the_second_stops_at_once(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with Interrupt() as interrupt:
        assert interrupt.signal_number is None
        signal.raise_signal(number)
        assert interrupt.signal_number == number
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(number) is before


def test_outside_of_the_main_thread_nothing_is_changed() -> None:
    seen = []

    def enter() -> None:
        with Interrupt() as interrupt:
            seen.append(interrupt.signal_number)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [None]
