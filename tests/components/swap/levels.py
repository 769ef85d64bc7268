"""Helpers that compare a plain model with a copy that is swapped at one of the levels."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from fuselayers.components.swap import SwapReport, swap
from tests.components.swap.layers import without_dropout
from tests.components.swap.models import FAMILIES, loss_of

both_levels = pytest.mark.parametrize("level", ["layers", pytest.param("blocks", marks=pytest.mark.slow)])


def pair(name: str, level: str, *, train: bool = True) -> tuple[nn.Module, nn.Module]:
    """A model of FAMILIES without dropout, and a swapped copy of it."""
    torch.manual_seed(0)
    plain = without_dropout(FAMILIES[name][0]()).train(train)
    swapped = copy.deepcopy(plain)
    assert swap_at(level, swapped).sites
    return plain, swapped


def swap_at(level: str, model: nn.Module, **more: Any) -> SwapReport:
    """Swap a model at a level, without verification."""
    # "eager" has the graphs of "inductor", and needs no C++ compiler.
    options: dict[str, Any] = {"level": level, "backend": "eager", "verify": False, **more}
    return swap(model, **options)


def gradients(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The loss, and the gradients by the parameters' names."""
    model.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    of_parameters = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"loss": loss.detach(), **of_parameters}


def classes(model: nn.Module) -> list[type]:
    """The class of each module."""
    return [type(module) for module in model.modules()]


def bytes_of(model: nn.Module) -> dict[str, bytes]:
    """The bytes of the state_dict, by key."""
    return {name: value.detach().numpy().tobytes() for name, value in model.state_dict().items()}
