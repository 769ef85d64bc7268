"""Definitions of a few lines, and tensors to run them on, for the tests of the stand-in."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.partition.compilers.nvfuser.fusion_definition import FusionDefinition, StandIn, replay

__all__ = ["Build", "bools", "close", "defined", "fd_type", "floats", "integers", "run"]

Build = Callable[..., Any]


def defined(stand_in: StandIn, build: Build, *inputs: Any) -> FusionDefinition:
    """The definition that `build` writes for inputs like these; numbers are scalar inputs."""
    fd: FusionDefinition = stand_in.FusionDefinition()
    with fd:
        values = [
            fd.from_pytorch(one)
            if isinstance(one, Tensor)
            else fd.define_scalar(stand_in.pytorch_utils.python_scalar_to_nvfuser_dtype(one))
            for one in inputs
        ]
        made = build(fd, *values)
        for output in made if isinstance(made, (list, tuple)) else [made]:
            fd.add_output(output)
    return fd


def run(stand_in: StandIn, build: Build, *inputs: Any) -> Any:
    """What a definition makes of its inputs, and the same from its script."""
    fd = defined(stand_in, build, *inputs)
    outputs = fd.execute(inputs)
    again = replay(fd.script(), stand_in)
    assert again.script() == fd.script()
    if "rand" not in fd.script():
        for first, second in zip(outputs, again.execute(inputs), strict=True):
            torch.testing.assert_close(first, second, rtol=0.0, atol=0.0, equal_nan=True)
    return outputs if len(outputs) > 1 else outputs[0]


def close(made: Tensor, wanted: Tensor) -> None:
    assert made.dtype == wanted.dtype
    torch.testing.assert_close(made, wanted, equal_nan=True)


def floats(*shape: int, low: float = -2.0, high: float = 2.0) -> Tensor:
    return torch.empty(shape).uniform_(low, high, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))


def integers(*shape: int, low: int = -9, high: int = 10) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(7 + sum(shape)))


def bools(*shape: int) -> Tensor:
    return integers(*shape) > 0


def fd_type(name: str) -> Any:
    """A DataType by its name, for the tables above, which know no stand-in."""
    return sys.modules["nvfuser_direct"].DataType[name]
