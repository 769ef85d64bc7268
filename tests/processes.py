"""Run programs in new processes, forked from a process that has only imported the library.

The import takes as long as the rest of most tests, so all programs share one import.
"""

import multiprocessing
import os
import signal
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PROCESSES", "Ended", "Program", "run"]

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["fuselayers.configs", "torch._dynamo", "matplotlib.figure"])
# A new process passes this text to `exec`, so that it need not import this file.
_AS_A_SCRIPT = """
import os, sys, types
os.dup2(os.open(printed, os.O_WRONLY), 1)
os.dup2(os.open(errors, os.O_WRONLY), 2)
os.environ.clear()
os.environ.update(environment)
os.chdir(folder)
sys.path.insert(0, "")
sys.argv[:] = [name, *arguments]
sys.modules["__main__"] = types.ModuleType("__main__")
exec(compile(program, name, "exec"), vars(sys.modules["__main__"]))
"""


@dataclass(frozen=True)
class Ended:
    """The end of a program.

    Attributes:
        code: its exit status, or minus the number of the signal that killed it.
        printed: its stdout.
        errors: its stderr.
    """

    code: int | None
    printed: str
    errors: str


class Program:
    """A Python program in a new process. It starts at once, with the environment of this process.

    Args:
        program: its text.
        arguments: its `sys.argv[1:]`.
        name: the file name in its tracebacks.
        folder: its working directory, from which it can import; by default that of this process.
    """

    def __init__(self, program: str, *arguments: str, name: str = "program", folder: Path | str | None = None) -> None:
        self._files = tempfile.TemporaryDirectory()
        self._printed, self._errors = (Path(self._files.name) / name for name in ("printed", "errors"))
        for file in (self._printed, self._errors):
            file.touch()
        environment = {
            "program": program,
            "arguments": arguments,
            "name": name,
            "folder": str(folder or Path.cwd()),
            "environment": dict(os.environ),
            "printed": str(self._printed),
            "errors": str(self._errors),
        }
        self._process = PROCESSES.Process(target=exec, args=(_AS_A_SCRIPT, environment))
        self._process.start()

    def runs(self) -> bool:
        """Whether the program is still running."""
        return self._process.is_alive()

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if the program still runs."""
        assert self._process.pid is not None
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, number)

    def wait(self) -> Ended:
        """Wait for the end. If the wait is interrupted, the program is killed."""
        try:
            self._process.join()
        finally:
            self._process.kill()
        with self._files:
            printed, errors = (file.read_text(encoding="utf-8") for file in (self._printed, self._errors))
        return Ended(self._process.exitcode, printed, errors)


def run(program: str, *arguments: str, name: str = "program", folder: Path | str | None = None) -> Ended:
    """Run a program to its end."""
    return Program(program, *arguments, name=name, folder=folder).wait()
