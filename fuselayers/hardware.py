"""hardware -- the speed of machines: a class, a table of GPUs, and the generation of the processor.

Sources of the table, read on 2026-11-26. A GB is 10^9 bytes. Arithmetic is dense, which is half of the figure "with
sparsity" in data sheets. Links and networks count one direction.

    arithmetic, memory   Bekman, "Machine Learning Engineering", github.com/stas00/ml-engineering at b9e2972,
                         compute/accelerator, also for bfloat16 of MI300X: 2.1 GHz x 1,216 cores x 512. MI325X has the
                         same compute. L4: its data sheet, as quoted by shops
    A100                 the SXM card of 80 GB: 2,039 GB/s, NVIDIA's data sheet
    B200                 180 GB of its 192 are usable: DGX B200 has 1,440 GB for eight
    links                the same book, network: NVLink 3 to 5, xGMI, PCIe 4 and 5 with 16 lanes
    network              assumed as in DGX systems, one adapter for each GPU: 200 Gb/s beside an A100, else 400 Gb/s
    kernels              launches of Triton kernels from Python, measured without a GPU; assumed equal for all
"""

import functools
import re
import sys
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True)
class Machine:
    """The speeds of a machine, from a data sheet or measured by `fuselayers tune`.

    Args:
        name: the source of the figures, or the name of a GPU.
        bandwidth: bytes per second to and from memory, streaming.
        flop_rate: floating point operations per second of a float32 matmul.
        low_precision_flop_rate: the same in bfloat16 or float16.
        vector_flop_rate: the same for elementwise ops, which use no matrix unit.
        kernel_seconds: the least time that one more kernel takes.
        memory: bytes. This and the next two are 0 for a measured machine.
        link: bytes/s in one direction between a GPU and all others of its node.
        network: bytes/s in one direction between a GPU and other nodes.
        mesh: whether the link is divided among the other GPUs of a node, as with xGMI, so that a small group gets less.

    Raises:
        ValueError: a speed without a default is not a finite number above 0.
    """

    name: str
    bandwidth: float
    flop_rate: float
    low_precision_flop_rate: float
    vector_flop_rate: float
    kernel_seconds: float
    memory: float = 0.0
    link: float = 0.0
    network: float = 0.0
    mesh: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            figure = field.name != "name" and field.default is MISSING
            if figure and (isinstance(value, bool) or not 0 < value <= sys.float_info.max):
                raise ValueError(f"{field.name} of a machine must be a finite number above 0, got {value}")

    def bytes_of_flops(self, flops: float, *, itemsize: int) -> float:
        """Return the bytes that could be moved while a matmul does `flops` on elements of `itemsize` bytes."""
        rate = self.flop_rate if itemsize >= 4 else self.low_precision_flop_rate
        return flops * self.bandwidth / rate

    @property
    def bytes_of_kernel(self) -> float:
        """The bytes that could be moved while one more kernel is launched."""
        return self.kernel_seconds * self.bandwidth


# name, GB of memory, TB/s, TFLOP/s in bfloat16 and float32, GB/s of a link and of the network
_ROWS: Final = (
    ("A100", 80, 2.039, 312, 19.5, 300, 25),
    ("L4", 24, 0.3, 121, 30.3, 31, 50),
    ("L40S", 48, 0.864, 362, 91.6, 31, 50),
    ("H100", 80, 3.35, 989, 67, 450, 50),
    ("H100 PCIe", 80, 2.0, 756, 51, 63, 50),
    ("GH200", 96, 4.0, 989, 67, 450, 50),
    ("H200", 141, 4.8, 989, 67, 450, 50),
    ("B200", 180, 8.0, 2250, 80, 900, 50),
    ("MI300X", 192, 5.3, 1307, 163.4, 448, 50),
    ("MI325X", 256, 6.0, 1307, 163.4, 448, 50),
)
_KERNEL_SECONDS: Final = 4e-6
GPUS: Final[Mapping[str, Machine]] = MappingProxyType(
    {
        name: Machine(
            name,
            bandwidth=bandwidth * 1e12,
            flop_rate=full * 1e12,
            low_precision_flop_rate=low * 1e12,
            vector_flop_rate=full * 1e12,
            kernel_seconds=_KERNEL_SECONDS,
            memory=memory * 1e9,
            link=link * 1e9,
            network=network * 1e9,
            mesh=name.startswith("MI"),
        )
        for name, memory, bandwidth, low, full, link, network in _ROWS
    }
)


_FAMILY_OF_ZEN_5: Final = 26  # Zen 4 has 25


@functools.cache
def processor_is_zen_5() -> bool:
    """Return whether the processor is AMD's, of Zen 5 or later, by /proc/cpuinfo. False on other systems than Linux."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    family = re.search(r"^cpu family\s*: (\d+)$", text, re.MULTILINE)
    return "AuthenticAMD" in text and family is not None and int(family[1]) >= _FAMILY_OF_ZEN_5
