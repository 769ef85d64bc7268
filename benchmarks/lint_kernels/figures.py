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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from torch import Tensor

from benchmarks.lint_kernels.assembly import Code
from benchmarks.lint_kernels.cases import Case, steps_of
from benchmarks.lint_kernels.compile import compile_for, threads_of
from benchmarks.lint_kernels.roofline import CHIPS, Work, seconds_of, share_of
from fuselayers.cli.files import write_text
from fuselayers.ops.implementations.launch import Launch

FIGURES: Final = Path(__file__).with_name("figures.json")
BUDGET: Final = 6.9
"""Instructions per byte moved."""
GOALS: Final = (0.9, 0.8)
"""The expected share of a copy's rate, of forward and of both."""
# Forward of an op with one input, on [8192, 4096] in 16 bits.
_LEAST_BYTES: Final = 1 << 27
_SLACK: Final = 1.05
_VECTOR: Final = re.compile("weight|bias")
_SHARE_SLACK: Final = 0.02
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
        moved: bytes per element, each tensor once.
        budget: of instructions per element, or None where there is none.
        resident: programs that one processor runs at a time.
        in_flight: bytes that they load before they wait.
        seconds: expected, see `roofline`.
        share: of a copy's rate, expected.
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
    moved: float
    budget: float | None
    resident: int
    in_flight: int
    seconds: float
    share: float

    @property
    def place(self) -> str:
        """For messages."""
        return f"{self.case}, {self.kernel}, {self.arch}"


@dataclass(frozen=True)
class Accepted:
    """A known fault ("spills", "narrow", "budget", or "share" of the kernel "all") of a case, and why it stays."""

    case: str
    kernel: str
    fault: str
    reason: str


@dataclass(frozen=True)
class Figures:
    """The content of the file: the compiler, the accepted faults, and the figures of each kernel and case.

    `kernels[case][kernel][arch]` is [instructions per element, accesses of less than 128 bits, spills],
    `expected[case][arch]` [kernels of forward and of backward, share of a copy's rate of forward and of both].
    """

    compiler: str
    accepted: tuple[Accepted, ...]
    kernels: dict[str, dict[str, dict[str, list[float]]]]
    expected: dict[str, dict[str, list[float]]] = field(default_factory=dict)


def measure(case: Case, launch: Launch, arch: str, code: Code, shared: int) -> Row:
    """Return the figures of a launch's code."""
    given = {id(one): one for one in launch.arguments if isinstance(one, Tensor)}.values()
    largest = max(given, key=lambda one: one.numel())
    elements, width = largest.numel(), largest.shape[-1]
    names = [parameter.name for parameter in launch.function.params if parameter.is_constexpr]
    constants = zip(names, launch.constants, strict=True)
    tile = math.prod(value for name, value in constants if name.startswith("BLOCK_"))
    programs, threads, gpu = math.prod(launch.grid), threads_of(launch, arch), CHIPS[arch]
    trips = elements / (programs * tile)
    resident = gpu.processor.resident(registers=code.registers, shared=shared, threads=threads)
    moved = sum(one.nbytes for one in given)
    work = Work(
        programs=programs,
        resident=resident,
        threads=threads,
        instructions=code.instructions(trips),
        shuffles=code.shuffles(trips),
        waits=max(code.loading_loops * math.ceil(trips), 1),
        ahead=code.ahead,
        moved=moved,
    )
    seconds = seconds_of(work, gpu)
    accesses = code.accesses()
    # A vector is as long as a column where there are as many rows as columns; its name tells them apart.
    named = {id(one): parameter.name for one, parameter in zip(launch.arguments, launch.function.params, strict=False)}
    scalars = sum(one.numel() <= elements // width and not _VECTOR.search(named[id(one)]) for one in given)
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
        instructions=round(work.instructions * programs * threads / elements, 1),
        moved=round(moved / elements, 1),
        budget=round(BUDGET * moved / elements, 1) if arch.startswith("sm_") and largest.element_size() == 2 else None,
        resident=resident,
        in_flight=min(resident, math.ceil(programs / gpu.processors)) * threads * code.loaded(),
        seconds=seconds,
        share=round(share_of(moved, seconds, gpu), 2),
    )


@dataclass(frozen=True)
class Expected:
    """The expected times of a case on one GPU.

    Attributes:
        case: the case's title.
        arch: the architecture.
        kernels: that forward and backward start, torch's too.
        seconds: of forward and of both.
        shares: of a copy's rate, that forward and both move the least bytes at; None where memory is no limit.
    """

    case: str
    arch: str
    kernels: tuple[int, int]
    seconds: tuple[float, float]
    shares: tuple[float, float] | None

    @property
    def place(self) -> str:
        """For messages."""
        return f"{self.case}, {self.arch}"

    @property
    def text(self) -> str:
        """The shares."""
        return "" if self.shares is None else f"{self.shares[0]:.0%} and {self.shares[1]:.0%}"

    @property
    def misses_the_goal(self) -> bool:
        """True below a goal; smaller inputs have none, since starting a kernel takes as long as their bytes."""
        if self.shares is None or self.seconds[0] < 0.9 * _LEAST_BYTES / CHIPS[self.arch].bandwidth:
            return False
        return any(share < goal for share, goal in zip(self.shares, GOALS, strict=True))


def expected_of(case: Case, arch: str) -> Expected:
    """Return the expected times of a case; compiles its kernels."""
    gpu, steps, seconds = CHIPS[arch], steps_of(case, arch), [0.0, 0.0]
    for place, of_span in enumerate(steps):
        for step in of_span:
            if isinstance(step, Launch):
                seconds[place] += measure(case, step, arch, *compile_for(step, arch)).seconds
            else:
                seconds[place] += gpu.start + step / gpu.bandwidth
    shares = None
    if case.floor is not None:
        forward, backward = case.floor
        shares = round(share_of(forward, seconds[0], gpu), 2), round(share_of(forward + backward, sum(seconds), gpu), 2)
    return Expected(case.title, arch, (len(steps[0]), len(steps[1])), (seconds[0], sum(seconds)), shares)


def faults(rows: Iterable[Row], figures: Figures, *, compiler: str, expected: Iterable[Expected] = ()) -> list[str]:
    """Return a line for each fault: unaccepted spills, narrow accesses, budgets and shares, figures that became worse.

    Figures of another compiler are not compared.
    """
    accepted = {(one.case, one.kernel, one.fault) for one in figures.accepted}
    found = []
    for row in rows:
        found += [
            f"{row.place}: {text}"
            for fault, text in _faults_of(row).items()
            if (row.case, row.kernel, fault) not in accepted
        ]
        if compiler != figures.compiler:
            continue
        before = figures.kernels.get(row.case, {}).get(row.kernel, {}).get(row.arch)
        if before is None:
            found.append(f"{row.place}: no figure to compare with; run benchmarks.lint_kernels --write")
            continue
        meanings = ("instructions per element", "accesses of less than 128 bits in all", "spills")
        for number, old, slack, meaning in zip(_figures_of(row), before, (_SLACK, 1, 1), meanings, strict=True):
            if number > slack * old:
                found.append(f"{row.place}: {number:g} {meaning}, before {old:g}")
    for one in expected:
        if one.misses_the_goal and (one.case, "all", "share") not in accepted:
            found.append(f"{one.place}: expected at {one.text} of a copy's rate, the goals are 90 % and 80 %")
        if compiler != figures.compiler or one.shares is None:
            continue
        before = figures.expected.get(one.case, {}).get(one.arch)
        if before is None:
            found.append(f"{one.place}: no expected share to compare with; run benchmarks.lint_kernels --write")
        elif sum(one.kernels) > before[0] + before[1]:
            found.append(f"{one.place}: {sum(one.kernels)} kernels, before {before[0] + before[1]:g}")
        elif any(share < old - _SHARE_SLACK for share, old in zip(one.shares, before[2:], strict=True)):
            found.append(f"{one.place}: expected at {one.text}, before {before[2]:.0%} and {before[3]:.0%}")
    return found


def _faults_of(row: Row) -> dict[str, str]:
    """Text by kind of fault."""
    found = {}
    if row.spills:
        found["spills"] = f"{row.spills} instructions move registers to memory or back"
    if row.narrow > row.scalars:
        found["narrow"] = f"{row.narrow - row.scalars} accesses of less than 128 bits to tensors"
    if row.budget is not None and row.instructions > row.budget:
        found["budget"] = f"{row.instructions} instructions per element, the budget is {row.budget}"
    return found


def _figures_of(row: Row) -> list[float]:
    return [row.instructions, row.narrow, row.spills]


def read_figures(path: Path = FIGURES) -> Figures:
    """Read the file."""
    content = json.loads(path.read_text(encoding="utf-8"))
    accepted = tuple(Accepted(**one) for one in content.pop("accepted"))
    return Figures(accepted=accepted, **content)


def write_figures(
    rows: Iterable[Row], expected: Iterable[Expected], before: Figures, *, compiler: str, path: Path = FIGURES
) -> None:
    """Write all figures, and the accepted faults that still exist. Add a new one by hand, with a reason."""
    kernels: dict[str, dict[str, dict[str, list[float]]]] = {}
    faulty: set[tuple[str, str, str]] = set()
    for row in rows:
        by_arch = kernels.setdefault(row.case, {}).setdefault(row.kernel, {})
        # A kernel that a case launches forward and backward has the larger figures.
        by_arch[row.arch] = [max(pair) for pair in zip(_figures_of(row), by_arch.get(row.arch, [0, 0, 0]), strict=True)]
        faulty |= {(row.case, row.kernel, fault) for fault in _faults_of(row)}
    shares: dict[str, dict[str, list[float]]] = {}
    for one in expected:
        if one.shares is not None:
            shares.setdefault(one.case, {})[one.arch] = [*one.kernels, *one.shares]
        if one.misses_the_goal:
            faulty.add((one.case, "all", "share"))
    accepted = [asdict(one) for one in before.accepted if (one.case, one.kernel, one.fault) in faulty]
    # A kernel's figures are one line, so that a change is one line of a diff.
    cases = [
        f"    {json.dumps(case)}: {{\n"
        + ",\n".join(f"      {json.dumps(kernel)}: {json.dumps(by_arch)}" for kernel, by_arch in found.items())
        + "\n    }"
        for case, found in kernels.items()
    ]
    text = (
        f'{{\n  "compiler": {json.dumps(compiler)},\n  "accepted": '
        + json.dumps(accepted, indent=2).replace("\n", "\n  ")
        + ',\n  "kernels": {\n'
        + ",\n".join(cases)
        + '\n  },\n  "expected": {\n'
        + ",\n".join(f"    {json.dumps(case)}: {json.dumps(by_arch)}" for case, by_arch in shares.items())
        + "\n  }\n}\n"
    )
    write_text(path, text)


def _widths(accesses: Counter[tuple[str, int]], kind: str) -> str:
    widths = sorted(((bits, count) for (which, bits), count in accesses.items() if which == kind), reverse=True)
    return " ".join(f"{count}x{bits}" for bits, count in widths)
