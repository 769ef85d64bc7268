"""data_sheets -- the peaks of GPUs, from the makers' data sheets. Used by `plan`."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

# TFLOP/s of dense matrix products in bfloat16, TF32 and float32, by words of the device's name as torch gives it. Data
# sheets state twice as much "with sparsity".
PEAKS: Final[Mapping[str, tuple[float, float, float]]] = MappingProxyType(
    {
        "A100": (312, 156, 19.5),
        "L4": (121, 60, 30.3),
        "L40S": (362, 183, 91.6),
        "H100": (989, 495, 67),
        "H100 PCIe": (756, 378, 51),
        "H100 NVL": (835, 418, 60),
        "GH200": (989, 495, 67),
        "H200": (989, 495, 67),
        "H200 NVL": (835, 418, 60),
        "B200": (2250, 1125, 75),
        "GB200": (2500, 1250, 80),
        "MI300X": (1307, 654, 163.4),
        "MI325X": (1307, 654, 163.4),
    }
)
