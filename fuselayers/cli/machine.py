"""What a measurement was made on: named beside every number that the CLI prints."""

import platform

import torch

from ..partition.machine import processor_name

__all__ = ["choose_device", "describe_machine", "synchronize"]


def choose_device(name: str, *, setting: str) -> torch.device:
    """The device that a setting means; "auto" is a GPU when torch can use one, else the CPU.

    Args:
        name: auto, or as torch names devices.
        setting: what the user set, for the error.

    Raises:
        ValueError: torch cannot use such a device here.

    >>> choose_device("cpu", setting="--device")
    device(type='cpu')
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type == "meta":
            raise RuntimeError("nothing runs on it")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"{setting} must be auto, cpu or a GPU that torch can use, got {name!r}") from error
    return device


def describe_machine(device: torch.device) -> str:
    """One line: the processor, the threads, the versions.

    >>> describe_machine(torch.device("cpu")).endswith(f"torch {torch.__version__}, Python {platform.python_version()}")
    True
    """
    where = processor_name() if device.type == "cpu" else torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    count = f"{threads} thread{'' if threads == 1 else 's'}"
    return f"{where}, {count}, torch {torch.__version__}, Python {platform.python_version()}"


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given, so that a clock read now tells the truth."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
