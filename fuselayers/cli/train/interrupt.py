"""Stopping a run between two steps, so that what is saved is whole."""

import signal
import threading
from types import FrameType, TracebackType

__all__ = ["Interrupt"]


class Interrupt:
    """While it is entered, Ctrl-C and SIGTERM set `signal_number` instead of raising.

    In the middle of a step half of the weights may be updated and the other half not: the loop looks at the flag after
    each step. A second signal raises KeyboardInterrupt at once, for a step that takes too long. Outside of the main
    thread Python allows no handlers, and nothing is changed there.

    >>> with Interrupt() as interrupt:
    ...     signal.raise_signal(signal.SIGINT)
    >>> interrupt.signal_number == signal.SIGINT
    True
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._handlers: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._handlers[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal_number is not None:
            raise KeyboardInterrupt
        self.signal_number = number
