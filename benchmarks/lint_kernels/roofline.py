"""The time that a kernel is expected to take on a GPU, from its code alone. Nothing of it has been measured.

A processor runs a few programs at a time, as many as its registers and its shared memory hold. A kernel's programs come
in waves of as many as the whole GPU runs at a time; the last wave may be smaller. A wave takes the longest of:

    memory      the bytes of its programs, over the rate of a copy
    arithmetic  the instructions of its programs on a processor, over those that a processor starts in a second
    waiting     a program's tiles, one after another: its loads take the latency of memory; then come its instructions,
                each of a warp three cycles after the one before, and its shuffles and barriers, each of which waits
                for the one before. A loop that loads a tile ahead takes the longer of the two, other code their sum.

The bytes in flight on a processor, over the latency, are the most that it can load (Little's law): that is the third
line with instructions that take no time. Each kernel starts `start` seconds after the one before has ended.

Assumptions, beside the figures of `CHIPS`: each tensor is moved once, since what a program reads again hits the cache,
whose rate is no limit; each scheduler starts an instruction in every cycle, whatever unit executes it; the latency does
not grow with the load; programs of a wave start and end together; stores are waited for by nothing; torch's own kernels
move their bytes at the rate of a copy. So the shares are upper limits, good for comparing two forms of a kernel.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from fuselayers.hardware import GPUS
from fuselayers.ops.implementations.occupancy import AMD, NVIDIA, Processor

_CYCLES_OF_AN_INSTRUCTION: Final = 3


@dataclass(frozen=True)
class Chip:
    """What the model needs to know of a GPU beside its `Machine`.

    Attributes:
        target: Triton's backend and its architecture, and the threads of a warp.
        processors: how many.
        processor: the resources of each.
        bandwidth: bytes per second of a copy, read and written: 0.9 of the memory's on NVIDIA's, 0.8 on AMD's.
        latency: seconds from a load to its data.
        clock: cycles per second.
        lanes: instructions of threads that a processor starts in a cycle.
        shuffle: cycles of a shuffle or a barrier.
        start: seconds between two kernels.
    """

    target: tuple[str, int | str, int]
    processors: int
    processor: Processor
    bandwidth: float
    latency: float
    clock: float
    lanes: int
    shuffle: int
    start: float


def _copy_rate(gpu: str, share: float) -> float:
    return round(share * GPUS[gpu].bandwidth, -11)  # the share is known to two digits


_A100: Final = NVIDIA._replace(shared=164 << 10)
CHIPS: Final[Mapping[str, Chip]] = MappingProxyType(
    {
        # A100 of 80 GB, H200 (its code is the H100's too), B200, MI300X.
        "sm_80": Chip(("cuda", 80, 32), 108, _A100, _copy_rate("A100", 0.9), 0.6e-6, 1.41e9, 128, 25, 1e-6),
        "sm_90": Chip(("cuda", 90, 32), 132, NVIDIA, _copy_rate("H200", 0.9), 0.8e-6, 1.76e9, 128, 25, 1e-6),
        "sm_100": Chip(("cuda", 100, 32), 148, NVIDIA, _copy_rate("B200", 0.9), 0.8e-6, 1.85e9, 128, 25, 1e-6),
        "gfx942": Chip(("hip", "gfx942", 64), 304, AMD, _copy_rate("MI300X", 0.8), 0.8e-6, 2.1e9, 64, 16, 2e-6),
    }
)


@dataclass(frozen=True)
class Work:
    """One launch of a kernel.

    Attributes:
        programs: of the grid.
        resident: programs that a processor runs at a time.
        threads: of a program.
        instructions: of a thread.
        shuffles: shuffles and barriers of a thread.
        waits: how often a program waits for loads.
        ahead: whether it computes meanwhile.
        moved: bytes of all tensors.
    """

    programs: int
    resident: int
    threads: int
    instructions: float
    shuffles: float
    waits: float
    ahead: bool
    moved: int


def seconds_of(work: Work, gpu: Chip) -> float:
    """Return the time of a launch, with the pause before it.

    >>> copy = Work(8192, 8, 128, instructions=100, shuffles=0, waits=1, ahead=False, moved=1 << 28)
    >>> round((1 << 28) / CHIPS["sm_90"].bandwidth / seconds_of(copy, CHIPS["sm_90"]), 2)
    0.98
    """
    arithmetic = (work.instructions * _CYCLES_OF_AN_INSTRUCTION + work.shuffles * gpu.shuffle) / gpu.clock
    loads = work.waits * gpu.latency
    waiting = max(loads, arithmetic) if work.ahead else loads + arithmetic

    def wave(programs: int) -> float:
        of_a_processor = math.ceil(programs / gpu.processors) * work.threads * work.instructions
        memory = work.moved * programs / work.programs / gpu.bandwidth
        return max(memory, of_a_processor / (gpu.lanes * gpu.clock), waiting)

    waves, rest = divmod(work.programs, gpu.processors * work.resident)
    return gpu.start + waves * wave(gpu.processors * work.resident) + (wave(rest) if rest else 0.0)


def share_of(moved: float, seconds: float, gpu: Chip) -> float:
    """Return the rate of moving bytes as a share of a copy's."""
    return moved / gpu.bandwidth / seconds
