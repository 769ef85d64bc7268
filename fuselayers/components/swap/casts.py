"""Casts under a condition, as T5 has them, as plain steps: an if statement would end a run.

if self.weight.dtype in [torch.float16, torch.bfloat16]:          x = as_half(x, self.weight)
    x = x.to(self.weight.dtype)                             ->

if (isinstance(self.wo.weight, torch.Tensor)                      x = as_weight(x, self.wo)
    and x.dtype != self.wo.weight.dtype
    and self.wo.weight.dtype != torch.int8):                ->
    x = x.to(self.wo.weight.dtype)
"""

import ast
import re
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

__all__ = ["as_half", "as_weight", "cast_of"]


def as_half(x: Tensor, weight: Tensor) -> Tensor:
    """x in the weight's dtype, if that is of 16 bits."""
    return x.to(weight.dtype) if weight.dtype in (torch.float16, torch.bfloat16) else x


def as_weight(x: Tensor, layer: nn.Module) -> Tensor:
    """x in the dtype of the layer's weight, if that is no int8."""
    weight: Any = layer.weight
    wanted = isinstance(weight, torch.Tensor) and x.dtype != weight.dtype and weight.dtype != torch.int8
    return x.to(weight.dtype) if wanted else x


_HALF: Final = re.compile(
    r"if self\.(?P<path>[\w.]+)\.dtype in \[torch\.float16, torch\.bfloat16\]:\s+"
    r"(?P<x>\w+) = (?P=x)\.to\(self\.(?P=path)\.dtype\)"
)
_WEIGHT: Final = re.compile(
    r"if isinstance\(self\.(?P<path>[\w.]+)\.weight, torch\.Tensor\) and "
    r"\(?(?P<x>\w+)\.dtype != self\.(?P=path)\.weight\.dtype\)? and "
    r"\(?self\.(?P=path)\.weight\.dtype != torch\.int8\)?:\s+"
    r"(?P=x) = (?P=x)\.to\(self\.(?P=path)\.weight\.dtype\)"
)


def cast_of(statement: ast.If) -> tuple[str, Callable[..., Tensor], str] | None:
    """Return the variable, the function and the path of its second argument; None for another statement."""
    text = ast.unparse(statement)
    for pattern, function in ((_HALF, as_half), (_WEIGHT, as_weight)):
        match = pattern.fullmatch(text)
        if match is not None:
            return match["x"], function, match["path"]
    return None
