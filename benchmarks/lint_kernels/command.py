"""`benchmarks.lint_kernels`: compiles every kernel for several GPUs, without one, and checks the figures."""

import argparse
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from rich.console import Console

from benchmarks.command import run_command
from benchmarks.lint_kernels.cases import CASES, Case, launches_of
from benchmarks.lint_kernels.compile import CHIPS, check_compilers, compile_for, compiler, threads_of
from benchmarks.lint_kernels.figures import FIGURES, Row, faults, measure, read_figures, write_figures
from fuselayers.cli.text import chosen_names, print_table, say

DESCRIPTION = f"""\
Compiles the Triton kernels of every op for several GPUs, with the compilers that come with Triton; no GPU is needed.
Prints for each kernel: registers, instructions that spill them, bytes of shared memory, the width of loads and stores,
and instructions per element of the largest tensor.

Limits: 6.9 instructions for each byte moved (16-bit tensors, NVIDIA's GPUs), no spills, no access of less than 128
bits. {FIGURES.name} holds the figures of one version of Triton. With that version it is a fault if a kernel executes
5 % more instructions, spills more or has more narrow accesses.

  python -m benchmarks.lint_kernels
  python -m benchmarks.lint_kernels --arch sm_90,gfx942 --op layer_norm
  python -m benchmarks.lint_kernels --write"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--arch", help=f"comma-separated, of {','.join(CHIPS)} (default all)")
    parser.add_argument("--op", help="comma-separated ops (default all with kernels)")
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
    archs = chosen_names("architecture", arguments.arch, CHIPS)
    names = chosen_names("op with kernels", arguments.op, dict.fromkeys(case.op for case in CASES))
    if arguments.write and (arguments.arch or arguments.op):
        raise ValueError("--write renews all figures; leave --arch and --op out")
    check_compilers()
    with console.status("compiling"):
        rows = list(lint([case for case in CASES if case.op in names], archs=archs))
    for title, of_case in groupby(rows, key=lambda row: row.case):
        say(console, title, bold=True)
        print_table(console, [_cells(row) for row in of_case], left=2)
    if arguments.write:
        write_figures(rows, compiler=compiler())
        say(console, f"figures written to {FIGURES}")
    figures = read_figures()
    lines = faults(rows, figures, compiler=compiler())
    say(
        console,
        f"compiled with {compiler()}; the checked-in figures are of {figures['compiler']}",
        *lines,
        f"{len(rows)} compiled, {len(lines) or 'no'} faults",
    )
    return int(bool(lines))


def lint(cases: Iterable[Case], *, archs: Sequence[str]) -> Iterator[Row]:
    """Yield the figures of the kernels of some cases."""
    for case in cases:
        for arch in archs:
            for launch in launches_of(case, arch):
                code, shared = compile_for(launch, arch)
                yield measure(case, launch, arch, code, shared=shared, threads=threads_of(launch, arch))


def _cells(row: Row) -> dict[str, object]:
    return {
        "kernel": row.kernel,
        "for": row.arch,
        **{name: getattr(row, name) for name in ("registers", "spills", "shared", "loads", "stores")},
        "per element": row.instructions,
        "budget": row.budget or "-",
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    return run_command("benchmarks.lint_kernels", DESCRIPTION, add_arguments, run, argv)
