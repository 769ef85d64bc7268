"""Model FLOPs utilisation: the share of the machine's peak arithmetic that a model's own matrix products take.

    utilisation = FLOPs of forward and backward per token x tokens per second / peak FLOP/s

(Chowdhery et al., "PaLM: scaling language modeling with pathways", 2022, appendix B.) FLOPs that a partitioner or
checkpointing spends on recomputing do not count.
"""

import time
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch

from ...configs import Config, model_costs
from ...hardware import gpu_named

_MATMUL_SIZE: Final = 512
_MATMUL_SECONDS: Final = 0.1


@dataclass(frozen=True)
class Utilisation:
    """What turns tokens per second into a share of the peak.

    Args:
        flops_per_token: of forward and backward at the run's sequence length; None where they cannot be counted.
        peak: FLOP/s of the machine; None where it is not known.
        source: where the peak is from, or why there is no utilisation, for the user.
    """

    flops_per_token: float | None
    peak: float | None
    source: str

    def of(self, tokens_per_second: float) -> float | None:
        """The utilisation at a speed; None where it is not known.

        >>> Utilisation(2e9, 1e12, "a data sheet").of(100.0)
        0.2
        """
        if self.flops_per_token is None or self.peak is None:
            return None
        return self.flops_per_token * tokens_per_second / self.peak


def utilisation_of(config: Config, *, length: int, device: torch.device, devices: int = 1) -> Utilisation:
    """Count the model once, on the meta device, and look up or measure the peak.

    Args:
        config: of the run.
        length: of a sequence; attention's FLOPs per token depend on it.
        device: of the model.
        devices: how many compute together; the peak is of all of them.
    """
    try:
        flops = model_costs(config, [f"model.context_length={length}"]).training_flops_per_token
    except Exception as error:
        # A layer of the user's own may do anything that fake tensors cannot; the run goes on without the figure.
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return Utilisation(None, None, f"no model FLOPs utilisation: the model cannot be counted: {reason:.200}")
    dtype = torch.bfloat16 if config.train.precision == "bfloat16" else torch.float32
    name = str(dtype).removeprefix("torch.")
    if device.type == "cpu":
        peak = devices * measured_matmul(dtype, threads=torch.get_num_threads())
        return Utilisation(
            flops, peak, f"MFU is the share of {_shown(peak)}, the rate of a {name} matmul measured here"
        )
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    found = data_sheet_peak(device_name, dtype)
    if found is None:
        return Utilisation(flops, None, f"no model FLOPs utilisation: the peak of {device_name} is not known")
    of_all = device_name if devices == 1 else f"{devices} x {device_name}"
    found *= devices
    return Utilisation(flops, found, f"MFU is the share of {_shown(found)}, the data sheet's of {of_all}, {name}")


def data_sheet_peak(device_name: str, dtype: torch.dtype) -> float | None:
    """The FLOP/s of a GPU's data sheet, of the entry with the most words; None for a GPU that is not in the table.

    float32 is TF32 where `torch.set_float32_matmul_precision` allows it.

    >>> data_sheet_peak("NVIDIA H100 80GB HBM3", torch.bfloat16)
    989000000000000.0
    """
    gpu = gpu_named(device_name)
    if gpu is None:
        return None
    if dtype != torch.float32:
        return gpu.low_precision_flop_rate
    return gpu.flop_rate if torch.get_float32_matmul_precision() == "highest" else gpu.tf32_flop_rate


@cache  # it takes a tenth of a second, and a process may train often, as tests do
def measured_matmul(dtype: torch.dtype, *, threads: int) -> float:
    """The FLOP/s of the fastest of some square matmuls on this CPU; torch's generators do not change.

    Args:
        dtype: of the factors.
        threads: that torch uses, of which the rate depends.
    """
    factor = torch.ones(_MATMUL_SIZE, _MATMUL_SIZE, dtype=dtype)
    fastest, started = float("inf"), time.perf_counter()
    while (before := time.perf_counter()) - started < _MATMUL_SECONDS:
        factor @ factor
        fastest = min(fastest, time.perf_counter() - before)
    return 2 * _MATMUL_SIZE**3 / fastest


def _shown(rate: float) -> str:
    return f"{rate / 1e12:,.0f} TFLOP/s" if rate >= 1e13 else f"{rate / 1e9:,.0f} GFLOP/s"
