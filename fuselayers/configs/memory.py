"""memory -- whether a model fits into the memory of a machine, asked before it is built."""

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import torch

from .._torch.dispatch import FakeTensor
from ..components import Choice
from .create import create_model
from .group_files import COMPONENT_SECTIONS
from .schemas import Config

_DEPTHS: Final = ("num_layers", "num_decoder_layers")
# The layers of each stage.
_OF_STAGES: Final = "depths"
_LAYERS: Final = ("layers", "decoder_layers")
# A module with its parameter as Python objects: 39 KB for the 12 of a layer (torch 2.13).
_MODULE_BYTES: Final = 3_000
# No layer has as many matrices of the largest two sizes, the experts of a mixture aside, which are a size themselves.
_MATRICES: Final = 64
# So many are built to be counted: of layers, one, or these if they differ; of experts, from which a token may choose.
_DIFFERENT_LAYERS: Final = 1_000
_EXPERTS: Final = 64


def check_memory(config: Config) -> None:
    """Raise ValueError if a model needs more memory than the machine has, swap left out, before it is built.

    Used by `build`, on torch's default device. A model with few layers is built on the meta device, which takes no
    memory, and counted; one whose sizes are small is not even counted.
    """
    device = torch.get_default_device()
    there = device_memory(device)
    # On the meta device only the Python objects take memory.
    copies = 0 if device.type == "meta" or isinstance(torch.empty(0), FakeTensor) else 1
    largest = max(_sizes(config), default=1)
    if _depth(config) * _MATRICES * (4 * copies * float(largest) * largest + _MODULE_BYTES) > there:
        weights, modules = _counted(config)
        objects = 0 if device.type == "cuda" else modules * _MODULE_BYTES
        check_bytes(copies * weights + objects, device, what="the model")


def check_bytes(asked: float, device: torch.device, *, what: str) -> None:
    """Raise ValueError if a device has less memory than `what` asks for."""
    there = device_memory(device)
    if asked > there:
        where = f"{device} has" if device.type == "cuda" else "this machine has"
        raise ValueError(
            f"{what} needs at least {_in_gigabytes(asked)} of memory, and {where} {_in_gigabytes(there)}; "
            "choose smaller sizes"
        )


def device_memory(device: torch.device) -> float:
    """Return the bytes of memory of a device; infinity for one that does not tell."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if device.type in ("cpu", "meta") else math.inf


def _depth(config: Config) -> int:
    options = config.model.options
    return sum(options.get(name) or 0 for name in _DEPTHS) + sum(options.get(_OF_STAGES, ())) or 1


def _sizes(value: Any) -> Iterator[float]:
    """Yield every number of a config's components but the depth."""
    if isinstance(value, Config):
        value = [getattr(value, kind) for kind in COMPONENT_SECTIONS]
    if isinstance(value, Choice):
        value = {name: option for name, option in value.options.items() if name not in (*_DEPTHS, _OF_STAGES)}
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for entry in value:
            yield from _sizes(entry)
    elif isinstance(value, (int, float)):
        yield value


def _counted(config: Config) -> tuple[float, float]:
    """Return the bytes of the weights and the number of modules, at least: as one layer or expert more shows them."""
    differ = any(config.model.options.get(name) for name in _LAYERS)
    stages = {f"{_OF_STAGES}.{stage}": depth for stage, depth in enumerate(config.model.options.get(_OF_STAGES, ()))}
    most = dict.fromkeys((*_DEPTHS, *stages), _DIFFERENT_LAYERS if differ else 1) | {"num_experts": _EXPERTS}
    counts = {**config.model.options, **config.feedforward.options, **stages}
    counts = {name: counts[name] for name in most if counts.get(name) is not None}
    few = {name: min(count, most[name]) for name, count in counts.items()}
    try:
        weights, modules = total_weights, total_modules = _built(config, few)
        for name, count in counts.items():
            if count > few[name]:
                with_one_more = _built(config, {**few, name: few[name] + 1})
                total_weights += (count - few[name]) * (with_one_more[0] - weights)
                total_modules += (count - few[name]) * (with_one_more[1] - modules)
    except Exception as error:
        # A tensor of more than 2**63 bytes. Any other error is raised again when the model is built.
        return (math.inf, 0) if "overflow" in str(error).lower() else (0, 0)
    return total_weights, total_modules


def _built(config: Config, counts: Mapping[str, int]) -> tuple[int, int]:
    """Return the same of a model with other counts, exactly."""
    model, feedforward = (
        Choice(one.name, {name: counts.get(name, value) for name, value in one.options.items()})
        for one in (config.model, config.feedforward)
    )
    if _OF_STAGES in model.options:
        depths = tuple(counts[f"{_OF_STAGES}.{stage}"] for stage in range(len(model.options[_OF_STAGES])))
        model = Choice(model.name, {**model.options, _OF_STAGES: depths})
    plain = replace(config, model=model, feedforward=feedforward, fusion=replace(config.fusion, scope="none"))
    with torch.device("meta"):
        built = create_model(plain)
    tensors = (*built.parameters(), *built.buffers())
    return sum(one.nbytes for one in tensors), sum(1 for _ in built.modules())


def _in_gigabytes(size: float) -> str:
    return f"{size / 1e9:,.0f} GB" if size < 2**63 else "2**63 bytes"
