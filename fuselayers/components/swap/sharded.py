"""A model that FSDP shards, as its forwards see it."""

from typing import Any

import torch
from torch import nn

from ..hooks import is_sharded

__all__ = ["as_in_forward"]


def as_in_forward(model: nn.Module) -> nn.Module:
    """Return a model that FSDP2 shards with whole parameters in place of the shards, and any other model as it is.

    The forward of such a model sees whole parameters, and outside of it there are shards alone. The result is for
    looking at: its modules share all else with those of the model, and its parameters are on the meta device.
    """
    if not any(map(is_sharded, model.modules())):
        return model
    return _twin(model, {})


def _twin(module: nn.Module, made: dict[int, nn.Module]) -> nn.Module:
    if id(module) not in made:
        # Not copy.copy: a class of FSDP makes another class when it is called.
        twin: Any = object.__new__(type(module))
        twin.__dict__.update(module.__dict__)
        made[id(module)] = twin
        twin.__dict__["_parameters"] = {name: _whole(one) for name, one in module._parameters.items()}
        twin.__dict__["_modules"] = {
            name: None if child is None else _twin(child, made) for name, child in module._modules.items()
        }
    return made[id(module)]


def _whole(parameter: nn.Parameter | None) -> nn.Parameter | None:
    if parameter is None or type(parameter) is nn.Parameter:
        return parameter
    # Its shape is that of the whole.
    return nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"), parameter.requires_grad)
