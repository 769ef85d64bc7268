"""The memory that a run has taken."""

import resource
import sys

import torch


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has had so far: tensors on a GPU, resident memory on a CPU.

    Resident memory counts Python and torch too.

    >>> peak_memory(torch.device("cpu")) > 10_000_000
    True
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # bytes on a Mac, else kibibytes
