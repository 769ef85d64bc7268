"""Stops a run between two steps, so that the checkpoint is consistent."""

import signal
import threading
from types import FrameType, TracebackType


class Interrupt:
    """A context in which Ctrl-C and SIGTERM set `signal_number` instead of raising; the loop reads it after each step.

    A second signal raises KeyboardInterrupt at once. Python allows handlers only in the main thread; in other threads
    nothing changes.

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
