"""The figures of a compiled kernel, what is wrong with them, and the file that holds them.

How often instructions are executed is known without a GPU: what stands outside of loops once for each program, what
stands inside as often as a program has tiles to go through. Every loop of our kernels goes over those.

The budget is that of an H200: 132 processors that start 128 instructions a cycle at 1.76 GHz, over the 4.3 TB/s that
its memory gives, are 6.9 instructions for a byte; with more of them arithmetic takes the time, not memory. It is for
16-bit tensors: those of 32 bits move twice the bytes.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from ...ops.implementations.launch import Launch
from ..files import write_whole
from .assembly import Code
from .cases import Case
from .compile import threads_of

__all__ = ["BUDGET", "FIGURES", "Accepted", "Figures", "Row", "faults", "measure", "read_figures", "write_figures"]

FIGURES: Final = Path(__file__).with_name("figures.json")
BUDGET: Final = 6.9
"""Instructions per byte moved."""
_SLACK: Final = 1.05
# A loop that loads one tile ahead has each access twice.
_ACCESSES_OF_A_SCALAR: Final = 2

_Nested = dict[str, dict[str, dict[str, float]]]  # by case, kernel and architecture


@dataclass(frozen=True)
class Row:
    """One kernel of one case, compiled for one architecture.

    Attributes:
        case: the case's title.
        kernel: module and function below `fuselayers.ops`.
        arch: what it was compiled for.
        registers: of a thread.
        spills: instructions that move registers to memory or back.
        shared: bytes of shared memory.
        loads: of global memory, as "14x128 1x64": how many, of how many bits.
        stores: likewise.
        narrow: accesses of less than 128 bits, beyond those of single numbers (a seed, statistics of a row). Where
            there is a loop, those in it: what a program reads or writes once, a bias or a sum, is little.
        all_narrow: the same with those of single numbers, among which a wide access that was lost could hide.
        instructions: that all threads execute, per element.
        moved: bytes per element, each tensor once.
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
    all_narrow: int
    instructions: float
    moved: float
    budget: float | None

    @property
    def place(self) -> str:
        """For messages."""
        return f"{self.case}, {self.kernel}, {self.arch}"


@dataclass(frozen=True)
class Accepted:
    """A fault that is known and held where it is.

    Attributes:
        case: the case's title.
        kernel: as in `Row`.
        fault: "spills", "narrow" or "budget".
        reason: why it is not mended.
        at_most: the figure that is accepted, by architecture.
    """

    case: str
    kernel: str
    fault: str
    reason: str
    at_most: dict[str, float]


@dataclass(frozen=True)
class Figures:
    """What the file holds.

    Attributes:
        compiler: what the figures were measured with.
        accepted: faults that are known.
        instructions: per element, by (case, kernel, architecture).
        narrow: `all_narrow` of the row, likewise.
    """

    compiler: str
    accepted: tuple[Accepted, ...]
    instructions: dict[tuple[str, str, str], float]
    narrow: dict[tuple[str, str, str], float]


def measure(case: Case, launch: Launch, arch: str, code: Code, shared: int) -> Row:
    """Return the figures of a launch's code."""
    given = {id(one): one for one in launch.arguments if isinstance(one, Tensor)}.values()
    largest = max(given, key=lambda one: one.numel())
    elements, width = largest.numel(), largest.shape[-1]
    names = [parameter.name for parameter in launch.function.params if parameter.is_constexpr]
    constants = zip(names, launch.constants, strict=True)
    tile = math.prod(value for name, value in constants if name.startswith("BLOCK_"))
    programs = math.prod(launch.grid)
    executed = code.instructions(elements / (programs * tile)) * programs * threads_of(launch, arch)
    moved = sum(one.numel() * one.element_size() for one in given) / elements
    accesses = code.accesses()
    scalars = sum(one.numel() <= elements // width and one.numel() != width for one in given)
    return Row(
        case=case.title,
        kernel=_kernel_name(launch.function),
        arch=arch,
        registers=code.registers,
        spills=code.spills,
        shared=shared,
        loads=_widths(accesses, "load"),
        stores=_widths(accesses, "store"),
        narrow=max(code.narrow() - _ACCESSES_OF_A_SCALAR * scalars, 0),
        all_narrow=code.narrow(),
        instructions=round(executed / elements, 1),
        moved=round(moved, 1),
        budget=round(BUDGET * moved, 1) if arch.startswith("sm_") and largest.element_size() == 2 else None,
    )


def faults(rows: Iterable[Row], figures: Figures, *, compiler: str) -> list[str]:
    """Return what is wrong, a line each: first of all spills, narrow accesses and budgets, then what became worse.

    Figures of another compiler say nothing about these rows. What is accepted is then accepted at any figure.
    """
    same = compiler == figures.compiler
    found = []
    for row in rows:
        accepted = {one.fault: one for one in figures.accepted if (one.case, one.kernel) == (row.case, row.kernel)}
        for fault, (figure, text) in _judged(row).items():
            limit = accepted[fault].at_most.get(row.arch) if fault in accepted else None
            if figure and limit is None:
                found.append(f"{row.place}: {text}")
            elif same and limit is not None and figure > limit:
                found.append(f"{row.place}: {text}; {limit:g} are accepted")
            elif same and limit is not None and not figure:
                found.append(f"{row.place}: {fault} are accepted, and there are none; run lint-kernels --write")
        if not same:
            continue
        key = row.case, row.kernel, row.arch
        if key not in figures.instructions or key not in figures.narrow:
            found.append(f"{row.place}: no figure to compare with; run lint-kernels --write")
            continue
        instructions, narrow = figures.instructions[key], figures.narrow[key]
        if row.instructions > _SLACK * instructions:
            found.append(f"{row.place}: {row.instructions} instructions per element, they were {instructions}")
        if row.all_narrow > narrow:
            found.append(f"{row.place}: {row.all_narrow} accesses of less than 128 bits in all, they were {narrow}")
    return found


def _judged(row: Row) -> dict[str, tuple[float, str]]:
    """What must be 0, by the name under which it may be accepted, and what it means if it is not."""
    over_budget = row.instructions if row.budget is not None and row.instructions > row.budget else 0
    return {
        "spills": (row.spills, f"{row.spills} instructions move registers to memory or back"),
        "narrow": (row.narrow, f"{row.narrow} accesses of less than 128 bits to tensors"),
        "budget": (over_budget, f"{row.instructions} instructions per element, the budget is {row.budget}"),
    }


def read_figures(path: Path = FIGURES) -> Figures:
    """Return what the file holds."""
    content = json.loads(path.read_text(encoding="utf-8"))
    return Figures(
        compiler=content["compiler"],
        accepted=tuple(Accepted(**one) for one in content["accepted"]),
        instructions=_flat(content["instructions"]),
        narrow=_flat(content.get("narrow", {})),
    )


def write_figures(rows: Iterable[Row], before: Figures, *, compiler: str, path: Path = FIGURES) -> None:
    """Write the figures of rows, of all that there are. What is accepted stays as far as it is still there: what is
    new has to be written down by hand, with its reason."""
    instructions: _Nested = {}
    narrow: _Nested = {}
    now: dict[tuple[str, str, str, str], float] = {}
    for row in rows:
        for figures, figure in ((instructions, row.instructions), (narrow, row.all_narrow)):
            # A kernel that a case launches forward and backward has one figure, the larger.
            by_arch = figures.setdefault(row.case, {}).setdefault(row.kernel, {})
            by_arch[row.arch] = max(figure, by_arch.get(row.arch, 0))
        for fault, (figure, _) in _judged(row).items():
            place = row.case, row.kernel, fault, row.arch
            now[place] = max(figure, now.get(place, 0))
    accepted = []
    for one in before.accepted:
        still = {arch: now.get((one.case, one.kernel, one.fault, arch), 0) for arch in one.at_most}
        at_most = {arch: figure for arch, figure in still.items() if figure}
        if at_most:
            accepted.append({**vars(one), "at_most": at_most})
    parts = [
        f'"compiler": {json.dumps(compiler)}',
        '"accepted": ' + json.dumps(accepted, indent=2).replace("\n", "\n  "),
        f'"instructions": {_json(instructions)}',
        f'"narrow": {_json(narrow)}',
    ]
    text = "{\n  " + ",\n  ".join(parts) + "\n}\n"
    write_whole(path, lambda file: file.write(text.encode()))


def _flat(figures: _Nested) -> dict[tuple[str, str, str], float]:
    return {
        (case, kernel, arch): figure
        for case, kernels in figures.items()
        for kernel, by_arch in kernels.items()
        for arch, figure in by_arch.items()
    }


def _json(figures: _Nested) -> str:
    """With a kernel's figures on one line, so that a change is a line of a diff."""
    cases = (
        f"\n    {json.dumps(case)}: {{"
        + ",".join(f"\n      {json.dumps(kernel)}: {json.dumps(by_arch)}" for kernel, by_arch in kernels.items())
        + "\n    }"
        for case, kernels in figures.items()
    )
    return "{" + ",".join(cases) + "\n  }"


def _kernel_name(function: Any) -> str:
    module = function.module.removeprefix("fuselayers.ops.")
    return f"{module}.{function.__name__.strip('_').removesuffix('_kernel')}"


def _widths(accesses: Counter[tuple[str, int]], kind: str) -> str:
    widths = sorted(((bits, count) for (which, bits), count in accesses.items() if which == kind), reverse=True)
    return " ".join(f"{count}x{bits}" for bits, count in widths)
