import os
import signal
import threading

import pytest
from rich.console import Console

from fuselayers.cli.train.interrupt import Interrupt, stops_without_output


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


def test_signals_that_come_twice_stop_nothing_in_the_middle() -> None:
    with Interrupt(once=False) as interrupt:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(number)
        assert interrupt.signal_number == signal.SIGTERM


def test_outside_of_the_main_thread_nothing_is_changed() -> None:
    seen = []

    def enter() -> None:
        with Interrupt() as interrupt:
            seen.append(interrupt.signal_number)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [None]


def test_a_terminal_that_closes_may_say_so_twice_and_others_after_it(hangup: None) -> None:
    with Interrupt() as interrupt:
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGTERM)
        assert interrupt.signal_number == signal.SIGHUP
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


def test_under_nohup_a_closed_terminal_stops_nothing() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupt() as interrupt:
            signal.raise_signal(signal.SIGHUP)
            assert interrupt.signal_number is None
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("terminal", [False, True], ids=["pipe", "terminal"])
def test_output_that_is_lost_is_noted_and_the_rest_goes_nowhere(terminal: bool) -> None:
    reads, writes = os.openpty() if terminal else os.pipe()
    with open(writes, "w") as file, Interrupt() as interrupt:
        console = Console(file=file)
        with stops_without_output(console, interrupt):
            console.print("before")
            assert os.read(reads, 100).split() == [b"before"]
            assert interrupt.signal_number is None
            os.close(reads)
            console.print("after")
            assert interrupt.signal_number == signal.SIGPIPE
            console.print("later")
        assert console.file is file
        console.print("after all")
