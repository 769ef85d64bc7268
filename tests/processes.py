"""Programs that run in a process of their own, forked from one that has imported the library and done nothing else.

Importing it takes as long as most of what a test does then, so it is imported once for all of them.
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
# Given to `exec`, which a new process finds without importing this file.
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
    """What became of a program.

    Attributes:
        code: its exit status; below 0 it is the number of the signal that killed it.
        printed: what it wrote to stdout.
        errors: what it wrote to stderr.
    """

    code: int | None
    printed: str
    errors: str


class Program:
    """A Python program that begins to run at once, with the environment of this process.

    Args:
        program: its text.
        arguments: its `sys.argv[1:]`.
        name: of the file that its errors name.
        folder: its working directory, from which it can import; that of this process when None.
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

    @property
    def pid(self) -> int:
        """The number of its process."""
        assert self._process.pid is not None
        return self._process.pid

    def runs(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.is_alive()

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, if it still runs."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def interrupt(self) -> None:
        """Press Ctrl-C, if it still runs."""
        self.send(signal.SIGINT)

    def wait(self) -> Ended:
        """Return what became of it when it has ended; it is killed where the waiting is cut short."""
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
