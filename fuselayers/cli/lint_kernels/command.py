"""`fuselayers lint-kernels`: compiles every kernel for several GPUs, without one, and checks the figures."""

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console

from ..files import write_text
from ..text import chosen_names, say, table_of
from .assembly import Code
from .cases import CASES, Case, kind_of, launches_of
from .compile import ARCHS, check_compilers, compile_for, compiler
from .figures import FIGURES, Row, faults, measure, read_figures, write_figures

SUMMARY = "compile every kernel for several GPUs, and check its figures"
DESCRIPTION = f"""\
Compiles the Triton kernels of every op for several GPUs, with the compilers that come with Triton; no GPU is needed.
Prints for each: registers, instructions that spill them, bytes of shared memory, the width of loads and stores, and
instructions executed per element of the largest tensor. A kernel of 16-bit tensors may execute 6.9 instructions for
each byte that it moves (on NVIDIA's GPUs). None may spill, or move tensors in less than 128 bits at a time. None may
execute 5 % more instructions, spill more, or have more accesses of less than 128 bits, than {FIGURES.name} says, which
holds the figures of one version of Triton; those of another version are not compared.

  fuselayers lint-kernels
  fuselayers lint-kernels --arch sm_90,gfx942 --op gated_activation --json kernels.json
  fuselayers lint-kernels --write"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--arch", help=f"comma-separated, of {','.join(ARCHS)} (default all)")
    parser.add_argument("--op", help="comma-separated ops (default all with kernels)")
    parser.add_argument("--json", metavar="FILE", help="write all figures to this file")
    parser.add_argument(
        "--write", action="store_true", help=f"write the figures to {FIGURES.name}, which later runs compare with"
    )


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Compile, print, and list the faults.

    Returns:
        The exit code: 0, or 1 when a kernel has a fault.

    Raises:
        ValueError: an unknown architecture or op; or Triton interprets kernels.
        BackendUnavailableError: Triton, or one of its tools, is missing.
    """
    archs = chosen_names("architecture", arguments.arch, ARCHS)
    names = chosen_names("op with kernels", arguments.op, dict.fromkeys(case.op for case in CASES))
    if arguments.write and (arguments.arch or arguments.op):
        raise ValueError("--write renews all figures; leave --arch and --op out")
    check_compilers()
    with console.status("compiling") as status:
        rows = []
        for row in lint((case for case in CASES if case.op in names), archs=archs):
            status.update(f"compiled {row.place}")
            rows.append(row)
    for title, of_case in groupby(rows, key=lambda row: row.case):
        console.print(table_of([_cells(row) for row in of_case], left=2, title=title), highlight=False)
    if arguments.json:
        content = {"compiler": compiler(), "kernels": [asdict(row) for row in rows]}
        write_text(Path(arguments.json), json.dumps(content, indent=2) + "\n")
    if arguments.write:
        write_figures(rows, read_figures(), compiler=compiler())
        say(console, f"figures written to {FIGURES}")
    figures = read_figures()
    found = faults(rows, figures, compiler=compiler())
    say(
        console,
        f"compiled with {compiler()}; the checked-in figures are of {figures.compiler}",
        *found,
        f"{len(rows)} compiled, {len(found) or 'no'} faults",
    )
    return int(bool(found))


def lint(cases: Iterable[Case], *, archs: Sequence[str]) -> Iterator[Row]:
    """Yield the figures of the kernels of some cases."""
    # Several cases share code.
    known: dict[tuple[Any, ...], tuple[Code, int]] = {}
    for case in cases:
        for launch in launches_of(case):
            for arch in archs:
                key = (arch, *kind_of(launch))
                if key not in known:
                    known[key] = compile_for(launch, arch)
                yield measure(case, launch, arch, *known[key])


def _cells(row: Row) -> dict[str, object]:
    return {
        "kernel": row.kernel,
        "for": row.arch,
        **{name: getattr(row, name) for name in ("registers", "spills", "shared", "loads", "stores")},
        "per element": row.instructions,
        "budget": row.budget or "-",
    }
