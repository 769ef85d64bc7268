"""Stops a run between two steps, so that the checkpoint is consistent."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import IO, Any, cast

from rich.console import Console


class Interrupt:
    """A context in which Ctrl-C, SIGTERM and a lost terminal's SIGHUP set `signal_number` instead of raising.

    The loop reads it after each step. A second signal raises KeyboardInterrupt at once, except SIGHUP, which a closed
    terminal sends twice. Where SIGHUP was ignored, as under nohup, it still is. Python allows handlers only in the main
    thread; in other threads nothing changes.

    Args:
        once: False where every signal comes twice, as to the processes of torchrun: from the terminal, and from
            torchrun, which kills those that do not end in time. Then a second one changes nothing.

    >>> with Interrupt() as interrupt:
    ...     signal.raise_signal(signal.SIGINT)
    >>> interrupt.signal_number == signal.SIGINT
    True
    """

    def __init__(self, *, once: bool = True) -> None:
        self._once = once
        self.signal_number: int | None = None
        self._asked = False
        self._handlers: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                    self._handlers[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def note(self, number: int) -> None:
        """Stop after this step, for the first reason that was noted."""
        self.signal_number = self.signal_number or number

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGHUP and self._once:
            if self._asked:
                raise KeyboardInterrupt
            self._asked = True
        self.note(number)


def exit_code(number: int) -> int:
    """The exit code of a run that a signal stopped, after its checkpoint.

    SIGTERM is how a scheduler takes a machine back: the run did what it was asked to, and a supervisor need not restart
    it as failed. Ctrl-C, a lost terminal and a closed pipe end it as they end any program, with 128 + the signal.

    >>> exit_code(signal.SIGTERM), exit_code(signal.SIGINT)
    (0, 130)
    """
    return 0 if number == signal.SIGTERM else 128 + number


@contextmanager
def stops_without_output(console: Console, interrupt: Interrupt) -> Iterator[None]:
    """Note SIGPIPE when the console's file can no longer be written, instead of raising in the middle of a step."""
    file = console.file
    console.file = cast(IO[str], _Output(file, interrupt))
    try:
        yield
    finally:
        console.file = file


class _Output:
    """A text file; after an error of the system what is written goes nowhere."""

    def __init__(self, file: IO[str], interrupt: Interrupt) -> None:
        self._file = file
        self._interrupt = interrupt

    def write(self, text: str) -> int:
        try:
            return self._file.write(text)
        except OSError:
            self._discard()
            return len(text)

    def flush(self) -> None:
        try:
            self._file.flush()
        except OSError:
            self._discard()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def _discard(self) -> None:
        self._interrupt.note(signal.SIGPIPE)
        # The file below, because Python flushes stdout once more at its exit.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._file.fileno())
        os.close(nowhere)
