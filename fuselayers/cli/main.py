"""The command line: reads the arguments, calls the command, and turns a user's mistake into one line."""

import argparse
import importlib
import io
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn, TextIO

import torch
from rich.console import Console

from .._version import __version__
from ..names import no_such, shown
from ..partition import BackendUnavailableError, FallbackWarning
from . import backends, bench, explain, lint_kernels, train, tune
from . import list as list_command
from .text import complain

_Command = Callable[[argparse.Namespace, Console], int]
_BAD_INPUT = 2
# The commands that build a config, which may name a class of the user.
_IMPORTING = ("train", "list", "bench", "explain", "tune")
_LONG = re.compile(r"(\S{300})\S+")
# Errors that the user can fix. Any other error is a bug, and keeps its traceback.
_USERS_ERRORS = (ValueError, TypeError, OSError, BackendUnavailableError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments after the program's name; those of the process when None.

    Returns:
        The exit code: 0 when all is well, 1 when a bench refused to time wrong numbers or a kernel has a fault, 2 for
        bad input (with one line on stderr that says what to change), 128 + the number of a signal that stopped a
        training, SIGPIPE's (141) where stdout could no longer be written.

    >>> main(["backends", "--help"])  # doctest: +ELLIPSIS
    usage: fuselayers backends ...
    0
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser, commands = _parser()
    show_traceback = "--traceback" in arguments
    try:
        first = next((argument for argument in arguments if not argument.startswith("-")), None)
        if first is not None and first not in commands:
            raise ValueError(no_such("command", first, commands))
        parsed = parser.parse_args(arguments)
        if first is None:
            parser.print_help()
            return 0
        for module in getattr(parsed, "imports", ()):
            _import(module)
        with _fallbacks_in_one_line():
            return commands[first](parsed, _console())
    except SystemExit as done:
        # argparse exits after --help and --version, rich when the output is closed (`| head`).
        return int(done.code or 0)
    except KeyboardInterrupt:
        complain("stopped")
        return 130
    except Exception as error:
        if show_traceback or not (isinstance(error, _USERS_ERRORS) or _is_for_want_of_memory(error)):
            raise
        complain(_one_line(error))
        return _BAD_INPUT


def _console() -> Console:
    """stdout; without a terminal rich takes 80 columns, which is narrow for a table."""
    if sys.stdout is None:  # closed before the start
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and not sys.stdout.encoding.lower().startswith("utf"):
        # A letter that its encoding lacks must not end a finished run.
        sys.stdout.reconfigure(errors="backslashreplace")
    # rich reads the encoding from a file that it is given, and then draws tables in ASCII where it must.
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120)


class _Parser(argparse.ArgumentParser):
    """Raises argparse's errors as ValueError."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")


def _parser() -> tuple[_Parser, dict[str, _Command]]:
    parser = _Parser(prog="fuselayers", description="Fused transformer layers: train, measure and look around.")
    parser.add_argument("--version", action="version", version=f"fuselayers {__version__}")
    parser.add_argument("--traceback", action="store_true", help="show where in the code an error came from")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    commands: dict[str, _Command] = {}
    for name, module in (
        ("train", train),
        ("list", list_command),
        ("bench", bench),
        ("explain", explain),
        ("tune", tune),
        ("backends", backends),
        ("lint-kernels", lint_kernels),
    ):
        subparser = subparsers.add_parser(
            name,
            help=module.SUMMARY,
            description=module.DESCRIPTION,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(subparser)
        if name in _IMPORTING:
            subparser.add_argument(
                "--import",
                dest="imports",
                metavar="MODULE",
                action="append",
                default=[],
                help="import this module first: the components that it registers can be chosen; may be repeated",
            )
        commands[name] = module.run
    return parser, commands


def _import(name: str) -> None:
    """Import a module of `--import`, from the working directory too, as `python -m` does."""
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"--import takes the name of a module, as my_module or package.module, got {shown(name)}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        # The module itself may import a missing one.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"--import {name}: there is no module {error.name!r}, neither in {os.getcwd()} nor installed"
        ) from error


@contextmanager
def _fallbacks_in_one_line() -> Iterator[None]:
    """Print a FallbackWarning as one line, without its place in our code."""
    show_any_warning = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if issubclass(category, FallbackWarning):
            complain(str(message))
        else:
            show_any_warning(message, category, filename, lineno, file, line)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def _is_for_want_of_memory(error: Exception) -> bool:
    # torch's allocator on a CPU raises a plain RuntimeError.
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    else:
        text = str(error) or type(error).__name__
    if _is_for_want_of_memory(error):
        text = f"out of memory: {text.partition('DefaultCPUAllocator: ')[2] or text}; choose smaller sizes"
    return _LONG.sub(r"\g<1>...", " ".join(text.split()))
