"""occupancy -- how many programs of a kernel run on one processor of a GPU at a time.

Used by persistent kernels, which start just as many, and by `benchmarks.lint_kernels`.
"""

from typing import Final, NamedTuple

__all__ = ["AMD", "NVIDIA", "Processor"]

_REGISTERS_AT_ONCE: Final = 8


class Processor(NamedTuple):
    """The resources of one processor (NVIDIA: SM, AMD: CU), which its programs share.

    Attributes:
        registers: the number of 32-bit registers.
        shared: bytes of shared memory.
        reserved: bytes of shared memory that every program takes in addition to what it asks for.
        threads: the most threads at a time.
        programs: the most programs at a time.
    """

    registers: int
    shared: int
    reserved: int
    threads: int
    programs: int

    def resident(self, *, registers: int, shared: int, threads: int) -> int:
        """Return how many programs run at a time, at least one.

        Args:
            registers: registers per thread.
            shared: bytes of shared memory per program.
            threads: threads per program.

        >>> NVIDIA.resident(registers=164, shared=24_644, threads=256)
        1
        >>> NVIDIA.resident(registers=48, shared=8_224, threads=256)
        5
        """
        rounded = -(-max(registers, 1) // _REGISTERS_AT_ONCE) * _REGISTERS_AT_ONCE
        return max(
            1,
            min(
                self.registers // (rounded * threads),
                self.shared // max(shared + self.reserved, 1),
                self.threads // threads,
                self.programs,
            ),
        )


NVIDIA: Final = Processor(registers=1 << 16, shared=228 << 10, reserved=1 << 10, threads=2048, programs=32)
"""Compute capability 9.0 and 10.0."""
AMD: Final = Processor(registers=1 << 17, shared=64 << 10, reserved=0, threads=2048, programs=32)
"""CDNA 2 and 3."""
