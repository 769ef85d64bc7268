"""The memory of a run: refused before anything is built where there is surely not enough, measured while it trains."""

import resource
import sys

import torch

from ...configs import Config
from ...configs.memory import check_bytes, check_memory

# Weights, their gradients, and AdamW's two moments.
_COPIES = 4
# A token and its target in int64; every batch of a validation is made before the first one runs.
_TOKEN_BYTES = 16


def check_training_memory(config: Config, *, length: int, device: torch.device, parts: int = 1) -> None:
    """Raise ValueError if weights, gradients, optimizer and batches do not fit; what forward saves is not counted.

    Args:
        config: of the run.
        length: of a sequence.
        device: of the model. The batches are made in the machine's memory.
        parts: into which the weights are split; one of them is on the device.
    """
    check_memory(config, device=device, copies=_COPIES / parts, what="training the model")
    batches, sequences = config.train.evaluate_batches, config.train.batch_size
    check_bytes(
        batches * sequences * length * _TOKEN_BYTES,
        torch.device("cpu"),
        what=f"a validation of {batches} x {sequences} sequences of {length} tokens",
    )


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has had so far: tensors on a GPU, resident memory on a CPU.

    Resident memory counts Python, torch and the pages read so far of a memory-mapped text.

    >>> peak_memory(torch.device("cpu")) > 10_000_000
    True
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # bytes on a Mac, else kibibytes
