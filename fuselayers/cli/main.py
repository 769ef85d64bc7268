"""The command line: reads the arguments, calls the command, and turns a user's mistake into one line."""

import importlib
import io
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final

from rich.console import Console

from .._version import __version__
from ..errors import BackendUnavailableError, FallbackWarning, MissingPackageError
from ..names import shown
from .parser import Parser
from .text import complain
from .torchrun import is_launched

# Only the command that is called is imported: see Note: [imported when used].
_COMMANDS: Final = {
    "train": "train a language model on text, or continue a run",
    "export": "write a run's model as a folder with a safetensors file",
    "list": "show components with their options, or a composed config",
    "bench": "time an op, a model, or all ops, against eager PyTorch",
    "explain": "show what a model saves for backward, and why",
    "plan": "estimate the cost of training on many GPUs: memory, communication, time",
    "tune": "measure this machine, or which backend serves a model best",
    "swap": "put fused layers into a model, and compare it with the original",
    "backends": "show which backends can be used here",
}
# Any other error is a bug, and keeps its traceback.
_OF_THE_USER: Final = (ValueError, TypeError, OSError, BackendUnavailableError, MissingPackageError)
_BAD_INPUT: Final = 2
_LONG: Final = re.compile(r"(\S{300})\S+")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments after the program's name; those of the process when None.

    Returns:
        The exit code: 0 for success, also when SIGTERM stopped a training; 1 if `bench` found wrong numbers or errors;
        2 for bad input or a training that diverged (with one line on stderr that says what to change); 128 + the number
        of another signal.

    >>> main(["backends", "--help"])  # doctest: +ELLIPSIS
    usage: fuselayers backends ...
    0
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    show_traceback = "--traceback" in arguments
    try:
        name = next((argument for argument in arguments if not argument.startswith("-")), None)
        command = importlib.import_module(f".{name}", __package__) if name in _COMMANDS else None
        parser = _parser(name, command)
        parsed = parser.parse_args(arguments)
        if command is None:
            parser.print_help()
            return 0
        for module in getattr(parsed, "imports", ()):
            _import(module)
        with _fallbacks_in_one_line():
            code: int = command.run(parsed, _console())
            return code
    except SystemExit as done:
        # argparse exits after --help and --version, rich when the output is closed (`| head`).
        return int(done.code or 0)
    except KeyboardInterrupt:
        complain("stopped")
        return 130
    except Exception as error:
        if show_traceback or not (isinstance(error, _OF_THE_USER) or _is_for_want_of_memory(error)):
            if is_launched():
                complain(f"{type(error).__name__}, with the traceback that follows")
            raise
        complain(_one_line(error))
        return _BAD_INPUT


def _parser(name: str | None, command: ModuleType | None) -> Parser:
    """Return the parser of all commands, with the arguments of the one that is called."""
    parser = Parser(prog="fuselayers", description="Fused transformer layers: train, measure and look around.")
    parser.add_argument("--version", action="version", version=f"fuselayers {__version__}")
    parser.add_argument("--traceback", action="store_true", help="show where in the code an error came from")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for known, summary in _COMMANDS.items():
        subparser = subparsers.add_parser(known, help=summary)
        if known == name and command is not None:
            subparser.description = command.DESCRIPTION
            command.add_arguments(subparser)
    return parser


def _console() -> Console:
    """Return a console on stdout. Without a terminal it has 80 columns, or what COLUMNS says."""
    if sys.stdout is None:  # closed before the start
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and not sys.stdout.encoding.lower().startswith("utf"):
        # A character that the encoding lacks must not end a finished run.
        sys.stdout.reconfigure(errors="backslashreplace")
    return Console(file=sys.stdout)


def _import(name: str) -> None:
    """Import a module of `--import`, from the working directory too, as `python -m` does."""
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"--import takes the name of a module, such as my_module or package.module, got {shown(name)}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        # The missing module may be one that this module imports.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"--import {name}: there is no module {error.name!r}, neither in {os.getcwd()} nor installed"
        ) from error


@contextmanager
def _fallbacks_in_one_line() -> Iterator[None]:
    """Print a FallbackWarning as one line, without file and line number."""
    show_any_warning = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *location: Any, **more: Any) -> None:
        if issubclass(category, FallbackWarning):
            complain(str(message))
        else:
            show_any_warning(message, category, *location, **more)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def _is_for_want_of_memory(error: Exception) -> bool:
    # torch raises a RuntimeError: plain for a CPU, OutOfMemoryError for a GPU.
    of_torch = isinstance(error, RuntimeError) and re.search(r"can't allocate memory|out of memory", str(error))
    return isinstance(error, MemoryError) or bool(of_torch)


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    else:
        text = str(error) or type(error).__name__
    if _is_for_want_of_memory(error):
        text = f"out of memory: {text.partition('DefaultCPUAllocator: ')[2] or text}; choose smaller sizes"
    return _LONG.sub(r"\g<1>...", " ".join(text.split()))
