"""Reads compiled code: NVIDIA's SASS as `cuobjdump -sass -res-usage` prints it, and AMD's assembly."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

# /*0a50*/  @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;
_SASS_LINE: Final = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);", re.MULTILINE)
_SASS_ACCESS: Final = re.compile(r"(LDGSTS|LDG|STG)\b")
_SASS_WIDTH: Final = re.compile(r"\.[US]?(8|16|64|128|256)\b")
_AMD_LABEL: Final = re.compile(r"^(\.L\w+):")
_AMD_LINE: Final = re.compile(r"^\t([a-z]\w*)\s*(.*)")
# Scalar instructions (s_...) run once for a warp, on a separate unit; they do not delay the others.
_AMD_COUNTED: Final = ("v_", "ds_", "global_", "buffer_", "flat_", "scratch_")
_AMD_ACCESS: Final = re.compile(r"(?:global|buffer|flat)_(load|store)_(dwordx[234]|dword|[us]?short|[us]?byte)")
_AMD_WIDTHS: Final = {
    **{"dwordx4": 128, "dwordx3": 96, "dwordx2": 64, "dword": 32},
    **{"ushort": 16, "sshort": 16, "short": 16, "ubyte": 8, "sbyte": 8, "byte": 8},
}


@dataclass(frozen=True)
class Code:
    """A compiled kernel.

    Attributes:
        registers: of a thread.
        spills: instructions that move registers to memory or back.
        once: instructions outside of loops, by name.
        looped: instructions inside of loops, by name.
    """

    registers: int
    spills: int
    once: Counter[str]
    looped: Counter[str]

    def instructions(self, trips: float) -> float:
        """The number of instructions of a thread that runs every loop `trips` times."""
        return self.once.total() + trips * self.looped.total()

    def accesses(self) -> Counter[tuple[str, int]]:
        """Loads and stores of global memory, by ("load" or "store", bits)."""
        return _accesses(self.once + self.looped)

    def narrow(self) -> int:
        """The number of accesses of less than 128 bits; if a loop accesses memory, of those in loops."""
        accesses = _accesses(self.looped) or _accesses(self.once)
        return sum(count for (_, bits), count in accesses.items() if bits < 128)


def read_sass(text: str) -> Code:
    """Read the one function of a cubin.

    Raises:
        ValueError: the text has no function.

    >>> lines = ("/*0000*/ LDG.E.128 R4, [R2] ;", "/*0010*/ @P0 BRA 0x0 ;", "/*0020*/ EXIT ;")
    >>> code = read_sass("  REG:24\\n " + "\\n ".join(lines))
    >>> code.registers, dict(code.looped), dict(code.once)
    (24, {'LDG.E.128': 1, 'BRA': 1}, {'EXIT': 1})
    """
    registers = re.search(r"\bREG:(\d+)", text)
    lines = [(int(at, 16), name, rest) for at, name, rest in _SASS_LINE.findall(text) if name != "NOP"]
    if registers is None or not lines:
        raise ValueError(f"cuobjdump printed no function: {text[:200]!r}")
    index_of = {at: index for index, (at, _, _) in enumerate(lines)}
    loops = []
    for index, (at, name, rest) in enumerate(lines):
        target = re.search(r"0x([0-9a-f]+)\s*$", rest) if name.startswith("BRA") else None
        # The branch to itself at a function's end is never reached.
        if target is not None and int(target[1], 16) < at:
            loops.append((index_of[int(target[1], 16)], index))
    names = [name for at, name, rest in lines if not (name == "BRA" and rest.strip() == f"{at:#x}")]
    once, looped = _counted(names, loops)
    spills = sum(count for name, count in (once + looped).items() if name.startswith(("LDL", "STL")))
    return Code(int(registers[1]), spills, once, looped)


def read_amdgcn(text: str) -> Code:
    """Read the one function of AMD's assembly. Scalar instructions are not counted.

    Raises:
        ValueError: the text has no function.
    """
    registers, spills = (re.search(rf"\.vgpr_{what}:\s+(\d+)", text) for what in ("count", "spill_count"))
    labels: dict[str, int] = {}
    loops: list[tuple[int, int]] = []
    names: list[str] = []
    for line in text.splitlines():
        if label := _AMD_LABEL.match(line):
            labels[label[1]] = len(names)
        elif instruction := _AMD_LINE.match(line):
            name, operands = instruction[1], instruction[2].split()
            if name.startswith(("s_cbranch", "s_branch")) and operands and operands[0] in labels:
                loops.append((labels[operands[0]], len(names)))
            names.append(name)
    once, looped = (
        Counter({name: count for name, count in counted.items() if name.startswith(_AMD_COUNTED)})
        for counted in _counted(names, loops)
    )
    if registers is None or spills is None or not once:
        raise ValueError(f"no function in the assembly: {text[:200]!r}")
    return Code(int(registers[1]), int(spills[1]), once, looped)


def _counted(names: Sequence[str], loops: Sequence[tuple[int, int]]) -> tuple[Counter[str], Counter[str]]:
    once: Counter[str] = Counter()
    looped: Counter[str] = Counter()
    for index, name in enumerate(names):
        (looped if any(first <= index <= last for first, last in loops) else once)[name] += 1
    return once, looped


def _accesses(counted: Counter[str]) -> Counter[tuple[str, int]]:
    accesses: Counter[tuple[str, int]] = Counter()
    for name, count in counted.items():
        if access := _SASS_ACCESS.match(name):
            width = _SASS_WIDTH.search(name)
            accesses["store" if access[1] == "STG" else "load", int(width[1]) if width else 32] += count
        elif access := _AMD_ACCESS.match(name):
            accesses[access[1], _AMD_WIDTHS[access[2]]] += count
    return accesses
