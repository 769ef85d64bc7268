"""hardware -- the rates of GPUs, from data sheets, with the shares of them that large kernels reach.

Sources of memory and links; `cli/data_sheets.py` has the peaks of arithmetic:
    a100    NVIDIA A100 Tensor Core GPU data sheet (SXM4, 80 GB)
    h100    NVIDIA H100 Tensor Core GPU data sheet (SXM5, 80 GB)
    h200    NVIDIA H200 Tensor Core GPU data sheet (SXM5, 141 GB)
    b200    NVIDIA DGX B200 data sheet (180 GB for each GPU)
    mi300x  AMD Instinct MI300X data sheet (192 GB)
A GB is 10^9 bytes, as on the sheets. A link's bandwidth is that of one direction. The network is one adapter for each
GPU, as in DGX systems: 200 Gb/s beside an A100, 400 Gb/s beside the others.

Sources of the shares:
    matmul      Bekman, "Machine Learning Engineering", github.com/stas00/ml-engineering at 744d01e,
                compute/accelerator: the fastest measured bfloat16 product over the peak ("MAMF"); the H100's stands for
                the H200
    attention   FlashAttention-2 reaches 50-73 % of an A100 (Dao, arXiv 2307.08691) and 35 % of an H100 (Shah et al.,
                arXiv 2407.08608). For B200 and MI300X no figure was found: the H100's share is assumed
    bandwidth   assumed: a copy reaches about 90 % of the data sheet's
    sustained   of all three, what a training keeps of the best kernels: clocks fall under load, most products have
                other shapes, the host stalls. From one published run for each generation: MPT 7B, 2,048 tokens, 8 GPUs,
                github.com/mosaicml/llm-foundry at 8c8dd48, scripts/train/benchmarking: 4,641 tokens/s on each A100,
                10,643 on each H100. Assumed to be the H100's for the others
    links       80 % of the data sheet's, the same book, network: all-gather 361 and reduce-scatter 363 of 450 GB/s
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from ...names import no_such
from ..data_sheets import PEAKS
from .work import Rates

# FLOPs of one exponential in float32, as `fuselayers tune` counts it.
_EXP_FLOPS: Final = 16.0
# FLOPs of one number of Philox: ten rounds for four numbers, two wide products and some adds and exclusive ors in each.
_DRAW_FLOPS: Final = 30.0
_BANDWIDTH_SHARE: Final = 0.9
_LINK_SHARE: Final = 0.8
CPU: Final = "cpu"


@dataclass(frozen=True)
class Hardware:
    """A GPU and its links.

    Attributes:
        name: for people.
        memory: bytes.
        bandwidth: of the memory, bytes/s.
        bfloat16: FLOP/s of dense matrix products, the peak.
        float32: the same in float32, without TF32, which PyTorch leaves off.
        matmul_share: the share of the peak that large products reach.
        attention_share: the share of the peak that fused attention reaches.
        sustained: the share of these, and of the memory's, that a whole training keeps.
        link: bytes/s of one direction between a GPU and the others of its node.
        network: bytes/s of one direction between a GPU and other nodes.
        gpus_per_node: how many GPUs share the fast links.
        latency: seconds of a collective beside its bytes, for each doubling of the group.
        kernel_seconds: for a kernel to start where another one runs before it.
        measured: rates in float32, in the place of those of the data sheet.
    """

    name: str
    memory: float
    bandwidth: float
    bfloat16: float
    float32: float
    matmul_share: float
    attention_share: float
    sustained: float
    link: float
    network: float
    gpus_per_node: int = 8
    latency: float = 1e-5
    kernel_seconds: float = 3e-6
    measured: Rates | None = None

    def rates(self, precision: str) -> Rates:
        """Return the rates that a training keeps in a precision, "bfloat16" or "float32"."""
        if self.measured is not None:
            return self.measured
        peak = self.sustained * self.peak(precision)
        return Rates(
            matmul=self.matmul_share * peak,
            attention=self.attention_share * peak,
            bandwidth=self.sustained * _BANDWIDTH_SHARE * self.bandwidth,
            exponentials=self.sustained * self.float32 / _EXP_FLOPS,
            draws=self.sustained * self.float32 / _DRAW_FLOPS,
            kernel_seconds=self.kernel_seconds,
        )

    def peak(self, precision: str) -> float:
        """Return the data sheet's FLOP/s of dense products in a precision."""
        return self.bfloat16 if precision == "bfloat16" else self.float32

    def group_bandwidth(self, size: int, *, stride: int = 1) -> float:
        """Return the bytes/s of one direction that each GPU of a group has for a ring.

        Args:
            size: GPUs of the group.
            stride: the distance of neighbours in it: 1 for a tensor-parallel group, its size for the data-parallel
                groups across such groups. Across nodes, the rings of a group use the adapters of all its members of a
                node.
        """
        if size * stride <= self.gpus_per_node:
            return _LINK_SHARE * self.link
        members = max(self.gpus_per_node // stride, 1)
        return _LINK_SHARE * min(self.link, members * self.network)


def _peaks(name: str) -> tuple[float, float]:
    bfloat16, _, float32 = PEAKS[name]
    return bfloat16 * 1e12, float32 * 1e12


GPUS: Final[Mapping[str, Hardware]] = MappingProxyType(
    {
        "a100": Hardware("NVIDIA A100 SXM4 80 GB", 80e9, 2.039e12, *_peaks("A100"), 0.869, 0.6, 0.78, 300e9, 25e9),
        "h100": Hardware("NVIDIA H100 SXM5 80 GB", 80e9, 3.35e12, *_peaks("H100"), 0.803, 0.35, 0.665, 450e9, 50e9),
        "h200": Hardware("NVIDIA H200 SXM5 141 GB", 141e9, 4.8e12, *_peaks("H200"), 0.803, 0.35, 0.665, 450e9, 50e9),
        "b200": Hardware("NVIDIA B200 180 GB", 180e9, 8.0e12, *_peaks("B200"), 0.776, 0.35, 0.665, 900e9, 50e9),
        "mi300x": Hardware("AMD MI300X 192 GB", 192e9, 5.3e12, *_peaks("MI300X"), 0.514, 0.35, 0.665, 448e9, 50e9),
    }
)


def hardware_called(name: str) -> Hardware:
    """Return a GPU by name.

    Raises:
        ValueError: no such GPU; the text lists them.

    >>> hardware_called("h100").memory
    80000000000.0
    """
    if name not in GPUS:
        raise ValueError(no_such("gpu", name, (*GPUS, CPU)))
    return GPUS[name]
