"""Stops a run between two steps, so that the checkpoint is consistent."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def noted_signals(*, second_stops: bool = True) -> Iterator[list[int]]:
    """Note Ctrl-C and SIGTERM, instead of ending the process; yield the list of the signals that came.

    The loop reads the list after each step. A second signal raises KeyboardInterrupt at once.

    Args:
        second_stops: False if every signal comes twice, as under torchrun: from the terminal and from torchrun.
            torchrun kills processes that do not end in time.
    """
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(number)
        if second_stops and len(noted) > 1:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_code(number: int) -> int:
    """The exit code of a run that a signal stopped, after its checkpoint.

    A scheduler sends SIGTERM to take a machine back. The run then did what it was asked to, and a supervisor need not
    restart it as failed. Ctrl-C gives 128 + the signal, as in any program.
    """
    return 0 if number == signal.SIGTERM else 128 + number
