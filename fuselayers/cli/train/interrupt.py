"""Stops a run between two steps, so that the checkpoint is consistent."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def noted_signals(*, second_stops: bool = True) -> Iterator[list[int]]:
    """Note Ctrl-C, SIGTERM and the SIGHUP of a closed terminal, instead of ending the process; yield what came.

    The loop reads the list after each step. A second Ctrl-C or SIGTERM raises KeyboardInterrupt at once. If SIGHUP was
    ignored, as under nohup, it stays ignored.

    Args:
        second_stops: False if every signal comes twice, as under torchrun: from the terminal and from torchrun.
            torchrun kills processes that do not end in time.
    """
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        # A closed terminal sends SIGHUP twice.
        if second_stops and number != signal.SIGHUP and any(other != signal.SIGHUP for other in noted):
            raise KeyboardInterrupt
        noted.append(number)

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
