"""`fuselayers lint-kernels`: compiles every kernel for GPUs that need not be here, and says what became of it."""

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ...names import no_such
from ..files import write_whole
from .assembly import Code
from .cases import CASES, Case, kind_of, launches_of
from .compile import ARCHS, check_compilers, compile_for, compiler
from .figures import FIGURES, Row, faults, measure, read_figures, write_figures

__all__ = ["DESCRIPTION", "SUMMARY", "add_arguments", "lint", "run"]

SUMMARY = "compile every kernel for several GPUs, and check its figures"
DESCRIPTION = f"""\
Compiles the Triton kernels of every op for GPUs that need not be here, with the compilers that come with Triton, and
prints for each: registers, instructions that spill them, bytes of shared memory, how wide loads and stores are, and
instructions executed per element of the largest tensor. A kernel of 16-bit tensors may execute 6.9 instructions for
each byte that it moves (on NVIDIA's GPUs); none may spill, or move tensors in less than 128 bits at a time, or execute
5 % more, or have more accesses of less than 128 bits, than what is checked in ({FIGURES.name}, for one version of
Triton: another one's figures are not compared).

  fuselayers lint-kernels
  fuselayers lint-kernels --arch sm_90,gfx942 --op gated_activation --json kernels.json
  fuselayers lint-kernels --write"""

_FAULTY = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to compile, for what, and where to write the figures."""
    parser.add_argument("--arch", help=f"comma-separated, of {','.join(ARCHS)} (default all)")
    parser.add_argument("--op", help="comma-separated names of ops (default all that have kernels)")
    parser.add_argument("--json", metavar="FILE", help="also write all figures there")
    parser.add_argument("--write", action="store_true", help="check these figures in, for later ones to be compared")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Compile, print, and list what is wrong.

    Returns:
        The exit code: 0, or 1 when a kernel has a fault.

    Raises:
        ValueError: an unknown architecture or op; or Triton was told to interpret.
        BackendUnavailableError: Triton, or a tool of it, is missing.
    """
    archs = _chosen("architecture", arguments.arch, tuple(ARCHS))
    names = _chosen("op with kernels", arguments.op, tuple(dict.fromkeys(case.op for case in CASES)))
    if arguments.write and (arguments.arch or arguments.op):
        raise ValueError("--write renews all figures; leave --arch and --op out")
    check_compilers()
    with console.status("compiling") as status:
        rows = []
        for row in lint((case for case in CASES if case.op in names), archs=archs):
            status.update(f"compiled {row.place}")
            rows.append(row)
    for title, of_case in groupby(rows, key=lambda row: row.case):
        console.print(_table(title, of_case), highlight=False)
    if arguments.json:
        content = {"compiler": compiler(), "kernels": [asdict(row) for row in rows]}
        text = json.dumps(content, indent=2) + "\n"
        write_whole(Path(arguments.json), lambda file: file.write(text.encode()))
    if arguments.write:
        write_figures(rows, read_figures(), compiler=compiler())
        console.print(f"figures written to {FIGURES}", highlight=False, soft_wrap=True)
    figures = read_figures()
    console.print(f"compiled with {compiler()}; figures are of {figures.compiler}", highlight=False)
    found = faults(rows, figures, compiler=compiler())
    for fault in found:
        console.print(fault, highlight=False, markup=False, soft_wrap=True)
    console.print(f"{len(rows)} compiled, {len(found) or 'no'} faults", highlight=False)
    return _FAULTY if found else 0


def lint(cases: Iterable[Case], *, archs: Sequence[str]) -> Iterator[Row]:
    """Yield the figures of the kernels of some cases."""
    # The same code serves several cases.
    known: dict[tuple[Any, ...], tuple[Code, int]] = {}
    for case in cases:
        for launch in launches_of(case):
            for arch in archs:
                key = (arch, *kind_of(launch))
                if key not in known:
                    known[key] = compile_for(launch, arch)
                yield measure(case, launch, arch, *known[key])


def _chosen(kind: str, text: str | None, known: tuple[str, ...]) -> tuple[str, ...]:
    names = known if text is None else tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in known:
            raise ValueError(no_such(kind, name, known))
    return names


def _table(title: str, rows: Iterable[Row]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for heading in ("kernel", "for"):
        table.add_column(heading, no_wrap=True)
    for heading in ("registers", "spills", "shared", "loads", "stores", "per element", "budget"):
        table.add_column(heading, justify="right")
    for row in rows:
        budget = "-" if row.budget is None else f"{row.budget}"
        cells = (row.registers, row.spills, row.shared, row.loads, row.stores, row.instructions, budget)
        table.add_row(row.kernel, row.arch, *map(str, cells))
    return table
