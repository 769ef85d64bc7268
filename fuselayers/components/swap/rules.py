"""What `swap` looks for, and what it puts there."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn

from .casts import as_half, as_weight
from .source import parse_run
from .steps import Run

__all__ = ["Rule"]

_NAMES: Final = {"torch": torch, "math": math, "F": F, "nn": nn, "as_half": as_half, "as_weight": as_weight}
"""The globals of a pattern."""


@dataclass(frozen=True)
class Rule:
    """A computation to look for in forwards, and the function that takes its place.

    A pattern is Python: plain statements that call modules, functions of torch and methods of tensors. Its names:

    - those in `slots` are attributes of the module whose forward it is. The value is a test of such an attribute,
      called when the model is swapped, and again in each call of the forward. Where it is False, nothing is replaced.
    - `torch`, `F`, `nn` and `math` are what they are everywhere. `as_half` and `as_weight` are the casts of `casts`.
    - those that the pattern assigns and `results` names are its results.
    - all others are inputs: any value.

    Of + and *, both orders match. How the source names values, and how it nests calls, does not matter.

    Attributes:
        name: what the report calls it.
        patterns: the pattern, or several that `replacement` computes alike.
        slots: a test for each attribute.
        applies: a test of the module, called when it is swapped; None for any module.
        one_op: whether the replacement is one op for a compiler, so that it is put inside of blocks too.
        inputs: names of inputs, in the order in which `replacement` takes them, before the slots.
        results: names of what `replacement` returns: one value, or a tuple of several.
        replacement: called with the inputs, then the slots by name, and `training` if it takes it.

    >>> double = Rule("double", ("y = x + x",), inputs=("x",), results=("y",), replacement=lambda x: 2 * x)
    """

    name: str
    patterns: tuple[str, ...]
    inputs: tuple[str, ...]
    results: tuple[str, ...]
    replacement: Callable[..., Any]
    slots: Mapping[str, Callable[[Any], bool]] = field(default_factory=dict)
    applies: Callable[[nn.Module], bool] | None = None
    one_op: bool = False

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """The patterns, read."""
        return tuple(parse_run(pattern, _NAMES) for pattern in self.patterns)
