"""`benchmarks.lint_kernels`: compiles every kernel for several GPUs, without one, and checks the figures."""

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

from rich.console import Console

from benchmarks.command import run_command
from benchmarks.lint_kernels.cases import CASES, Case, launches_of
from benchmarks.lint_kernels.compile import check_compilers, compile_for, compiler
from benchmarks.lint_kernels.figures import (
    FIGURES,
    Expected,
    Row,
    expected_of,
    faults,
    measure,
    read_figures,
    write_figures,
)
from benchmarks.lint_kernels.roofline import CHIPS
from fuselayers.cli.files import write_text
from fuselayers.cli.text import chosen_names, print_table, say

DESCRIPTION = f"""\
Compiles the Triton kernels of every op for several GPUs, with the compilers that come with Triton; no GPU is needed.
Prints for each kernel: registers, instructions that spill them, bytes of shared memory, the width of loads and stores,
instructions per element of the largest tensor, programs that a processor runs at a time, bytes that they load before
they wait, and the predicted rate of moving its tensors, as a share of a copy's. Then prints for each op the number of
kernels, and the predicted share of forward, and of forward and backward.

Limits: 6.9 instructions for each byte moved (16-bit tensors, NVIDIA's GPUs), no spills, no access of less than 128
bits. An op on [8192, 4096] or more must be predicted at 90 % forward and 80 % with backward. {FIGURES.name} holds the
figures of one version of Triton. With that version it is a fault if a kernel executes 5 % more instructions, spills
more or has more narrow accesses, or if an op starts more kernels or is predicted 2 points slower. Nothing has been
measured on a GPU: roofline.py states the model.

  python -m benchmarks.lint_kernels
  python -m benchmarks.lint_kernels --arch sm_90,gfx942 --op layer_norm --json all.json
  python -m benchmarks.lint_kernels --write"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--arch", help=f"comma-separated, of {','.join(CHIPS)} (default all)")
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
    archs = chosen_names("architecture", arguments.arch, CHIPS)
    names = chosen_names("op with kernels", arguments.op, dict.fromkeys(case.op for case in CASES))
    if arguments.write and (arguments.arch or arguments.op):
        raise ValueError("--write renews all figures; leave --arch and --op out")
    check_compilers()
    with console.status("compiling") as status:
        chosen = [case for case in CASES if case.op in names]
        rows = []
        for row in lint(chosen, archs=archs):
            status.update(f"compiled {row.place}")
            rows.append(row)
        expected = [expected_of(case, arch) for case in chosen for arch in archs]
    for title, of_case in groupby(rows, key=lambda row: row.case):
        print_table(console, [_cells(row) for row in of_case], left=2, title=title)
    print_table(console, [_expected_cells(one) for one in expected], left=2, title="expected")
    if arguments.json:
        content = {
            "compiler": compiler(),
            "kernels": [asdict(row) for row in rows],
            "expected": [asdict(one) for one in expected],
        }
        write_text(Path(arguments.json), json.dumps(content, indent=2) + "\n")
    if arguments.write:
        write_figures(rows, expected, read_figures(), compiler=compiler())
        say(console, f"figures written to {FIGURES}")
    figures = read_figures()
    found = faults(rows, figures, compiler=compiler(), expected=expected)
    say(
        console,
        f"compiled with {compiler()}; the checked-in figures are of {figures.compiler}",
        *found,
        f"{len(rows)} compiled, {len(found) or 'no'} faults",
    )
    return int(bool(found))


def lint(cases: Iterable[Case], *, archs: Sequence[str]) -> Iterator[Row]:
    """Yield the figures of the kernels of some cases."""
    for case in cases:
        for arch in archs:
            for launch in launches_of(case, arch):
                yield measure(case, launch, arch, *compile_for(launch, arch))


def _cells(row: Row) -> dict[str, object]:
    return {
        "kernel": row.kernel,
        "for": row.arch,
        **{name: getattr(row, name) for name in ("registers", "spills", "shared", "loads", "stores")},
        "per element": row.instructions,
        "budget": row.budget or "-",
        "resident": row.resident,
        "in flight": f"{row.in_flight / 1024:.0f} KB",
        "share": f"{row.share:.0%}",
    }


def _expected_cells(one: Expected) -> dict[str, object]:
    forward, both = ("-", "-") if one.shares is None else (f"{share:.0%}" for share in one.shares)
    return {
        "op": one.case,
        "for": one.arch,
        "kernels": "{} + {}".format(*one.kernels),
        "microseconds": f"{1e6 * one.seconds[0]:.0f} + {1e6 * (one.seconds[1] - one.seconds[0]):.0f}",
        "forward": forward,
        "with backward": both,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    return run_command("benchmarks.lint_kernels", DESCRIPTION, add_arguments, run, argv)
