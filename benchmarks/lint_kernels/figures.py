"""The figures of a compiled kernel, its faults, and the file with the figures of all kernels.

The number of executed instructions is known without a GPU: code outside of loops runs once for each program, code
inside runs once for each tile of a program. Every loop of our kernels goes over tiles.

The budget is that of an H200: 132 processors start 128 instructions a cycle at 1.76 GHz, and memory gives 4.3 TB/s.
That is 6.9 instructions for a byte; beyond, arithmetic takes the time, not memory. It holds for 16-bit tensors: those
of 32 bits move twice the bytes.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from benchmarks.lint_kernels.assembly import Code
from benchmarks.lint_kernels.cases import Case
from benchmarks.lint_kernels.record import Launch
from fuselayers.cli.files import write_text

FIGURES: Final = Path(__file__).with_name("figures.json")
BUDGET: Final = 6.9
"""Instructions per byte moved."""
_SLACK: Final = 1.05
_VECTOR: Final = re.compile("weight|bias")
# A loop that loads one tile ahead has each access twice.
_ACCESSES_OF_A_SCALAR: Final = 2


@dataclass(frozen=True)
class Row:
    """One kernel of one case, compiled for one architecture.

    Attributes:
        case: the case's title.
        kernel: module and function below `fuselayers.ops`.
        arch: the architecture.
        registers: of a thread.
        spills: instructions that move registers to memory or back.
        shared: bytes of shared memory.
        loads: of global memory, as "14x128 1x64": how many, of how many bits.
        stores: likewise.
        narrow: accesses of less than 128 bits; of a kernel with a loop, those inside.
        scalars: how many of those single numbers need (a seed, statistics of a row).
        instructions: that all threads execute, per element.
        budget: of instructions per element, or None where there is none.
    """

    case: str
    kernel: str
    arch: str
    registers: int
    spills: int
    shared: int
    loads: str
    stores: str
    narrow: int
    scalars: int
    instructions: float
    budget: float | None

    @property
    def place(self) -> str:
        """For messages."""
        return f"{self.case}, {self.kernel}, {self.arch}"


def measure(case: Case, launch: Launch, arch: str, code: Code, *, shared: int, threads: int) -> Row:
    """Return the figures of a launch's code, which takes bytes of shared memory and the threads of a program."""
    tensors = {id(argument): argument for argument in launch.arguments if isinstance(argument, Tensor)}.values()
    largest = max(tensors, key=lambda tensor: tensor.numel())
    elements, width = largest.numel(), largest.shape[-1]
    constant_names = [parameter.name for parameter in launch.function.params if parameter.is_constexpr]
    constants = zip(constant_names, launch.constants, strict=True)
    tile = math.prod(value for name, value in constants if name.startswith("BLOCK_"))
    programs = math.prod(launch.grid)
    moved = sum(tensor.nbytes for tensor in tensors)
    accesses = code.accesses()
    # A vector is as long as a column where there are as many rows as columns; its name tells them apart.
    parameters = zip(launch.arguments, launch.function.params, strict=False)
    names = {id(argument): parameter.name for argument, parameter in parameters}
    scalars = sum(tensor.numel() <= elements // width and not _VECTOR.search(names[id(tensor)]) for tensor in tensors)
    module = launch.function.module.removeprefix("fuselayers.ops.")
    return Row(
        case=case.title,
        kernel=f"{module}.{launch.function.__name__.strip('_').removesuffix('_kernel')}",
        arch=arch,
        registers=code.registers,
        spills=code.spills,
        shared=shared,
        loads=_widths(accesses, "load"),
        stores=_widths(accesses, "store"),
        narrow=code.narrow(),
        scalars=_ACCESSES_OF_A_SCALAR * scalars,
        instructions=round(code.instructions(elements / (programs * tile)) * programs * threads / elements, 1),
        budget=round(BUDGET * moved / elements, 1) if arch.startswith("sm_") and largest.element_size() == 2 else None,
    )


def faults(rows: Iterable[Row], figures: dict[str, Any], *, compiler: str) -> list[str]:
    """Return a line for each fault: spills, narrow accesses and budgets that nobody accepted, worse figures.

    Figures of another compiler are not compared.
    """
    accepted = {_key(fault) for fault in figures["accepted"]}
    lines = []
    for row in rows:
        lines += [
            f"{row.place}: {text}"
            for fault, text in _faults_of(row).items()
            if (row.case, row.kernel, fault) not in accepted
        ]
        if compiler != figures["compiler"]:
            continue
        before = figures["kernels"].get(row.case, {}).get(row.kernel, {}).get(row.arch)
        if before is None:
            lines.append(f"{row.place}: no figure to compare with; run benchmarks.lint_kernels --write")
            continue
        meanings = ("instructions per element", "accesses of less than 128 bits in all", "spills")
        for number, old, slack, meaning in zip(_figures_of(row), before, (_SLACK, 1, 1), meanings, strict=True):
            if number > slack * old:
                lines.append(f"{row.place}: {number:g} {meaning}, before {old:g}")
    return lines


def _faults_of(row: Row) -> dict[str, str]:
    """Text by kind of fault."""
    texts = {}
    if row.spills:
        texts["spills"] = f"{row.spills} instructions move registers to memory or back"
    if row.narrow > row.scalars:
        texts["narrow"] = f"{row.narrow - row.scalars} accesses of less than 128 bits to tensors"
    if row.budget is not None and row.instructions > row.budget:
        texts["budget"] = f"{row.instructions} instructions per element, the budget is {row.budget}"
    return texts


def _figures_of(row: Row) -> list[float]:
    return [row.instructions, row.narrow, row.spills]


def _key(fault: dict[str, str]) -> tuple[str, str, str]:
    return fault["case"], fault["kernel"], fault["fault"]


def read_figures() -> dict[str, Any]:
    """Read the file: the compiler, the accepted faults, and the figures of each kernel.

    An accepted fault is a known one ("spills", "narrow" or "budget") of a case's kernel, with the reason why it stays.
    `kernels[case][kernel][arch]` is [instructions per element, accesses of less than 128 bits, spills].
    """
    content: dict[str, Any] = json.loads(FIGURES.read_text(encoding="utf-8"))
    return content


def write_figures(rows: Iterable[Row], *, compiler: str) -> None:
    """Write all figures, and the accepted faults that still exist. Add a new one by hand, with a reason."""
    kernels: dict[str, dict[str, dict[str, list[float]]]] = {}
    faulty: set[tuple[str, str, str]] = set()
    for row in rows:
        by_arch = kernels.setdefault(row.case, {}).setdefault(row.kernel, {})
        # A kernel that a case launches forward and backward has the larger figures.
        by_arch[row.arch] = [max(pair) for pair in zip(_figures_of(row), by_arch.get(row.arch, [0, 0, 0]), strict=True)]
        faulty |= {(row.case, row.kernel, fault) for fault in _faults_of(row)}
    accepted = [fault for fault in read_figures()["accepted"] if _key(fault) in faulty]
    # A kernel's figures are one line, so that a change is one line of a diff.
    cases = [
        f"    {json.dumps(case)}: {{\n"
        + ",\n".join(f"      {json.dumps(kernel)}: {json.dumps(by_arch)}" for kernel, by_arch in of_case.items())
        + "\n    }"
        for case, of_case in kernels.items()
    ]
    text = (
        f'{{\n  "compiler": {json.dumps(compiler)},\n  "accepted": '
        + json.dumps(accepted, indent=2).replace("\n", "\n  ")
        + ',\n  "kernels": {\n'
        + ",\n".join(cases)
        + "\n  }\n}\n"
    )
    write_text(FIGURES, text)


def _widths(accesses: Counter[tuple[str, int]], kind: str) -> str:
    widths = sorted(((bits, count) for (which, bits), count in accesses.items() if which == kind), reverse=True)
    return " ".join(f"{count}x{bits}" for bits, count in widths)
