"""create -- the plain model of a config, before it is fused, and whether it fits into the memory of the machine."""

import math
import os
from typing import Any

import torch
from torch import nn

from .._torch.dispatch import FakeTensor
from ..components import create
from .group_files import COMPONENT_GROUPS
from .schemas import Config
from .sections import with_layer_changes


def create_model(config: Config) -> nn.Module:
    """Return the model of a config, without fusion.

    Raises:
        TypeError, ValueError: a component refuses an option's value.
    """
    components = {group: getattr(config, group) for group in COMPONENT_GROUPS}
    model: nn.Module = create("model", with_layer_changes(config), **components)
    return model


def check_memory(config: Config) -> None:
    """Raise ValueError if a model needs more memory than the machine has, without swap space, before it is built.

    Used by `build`, on torch's default device. The bytes are counted on a model on the meta device, which takes none.
    """
    device = torch.get_default_device()
    if device.type == "meta" or isinstance(torch.empty(0), FakeTensor):
        return
    try:
        with torch.device("meta"):
            model = create_model(config)
        needed: float = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    except Exception as error:
        # A tensor of more than 2**63 bytes. Any other error is raised again when the model is built.
        needed = math.inf if "overflow" in str(error).lower() else 0
    check_bytes(needed, device)


def check_bytes(needed: float, device: torch.device) -> None:
    """Raise ValueError if a device has less memory than a model needs."""
    available = device_memory(device)
    if needed > available:
        where = f"{device} has" if device.type == "cuda" else "this machine has"
        raise ValueError(
            f"the model needs at least {_in_gigabytes(needed)} of memory, and {where} {_in_gigabytes(available)}; "
            "choose smaller sizes"
        )


def device_memory(device: torch.device) -> float:
    """Return the bytes of memory of a device, or infinity if the device does not tell."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if device.type in ("cpu", "meta") else math.inf


def _in_gigabytes(size: float) -> str:
    return f"{size / 1e9:,.0f} GB" if size < 2**63 else "2**63 bytes"


def check_described(config: Config, model: Any, *attributes: str) -> None:
    """Raise ValueError unless a model has `example_inputs` and the attributes. Used by costs and cli."""
    if not all(hasattr(model, name) for name in ("example_inputs", *attributes)):
        wanted = "".join(f" and an attribute {name}" for name in attributes)
        raise ValueError(
            f"model {config.model.name!r} does not say what it is called with; give {type(model).__name__} a method "
            f'example_inputs(batch_size=1, device="meta"){wanted}'
        )
