"""compiled -- an op's formula as one piece of C++, made by Inductor. Used by `forms` for the ops' forms on a CPU.

What is compiled is forward, and backward, each by itself and without autograd. So what is kept between the two is the
op's own choice, the same as with its kernels, and a backward may be differentiated again.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..partition import fuse
from ..partition.compilers import why_inductor_is_unavailable
from ..partition.torch_private import call_whatever_the_stance
from .launch import INTERPRETED

__all__ = ["compiled", "why_not_compiled"]


def compiled(formula: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that compiles `formula` at its first call, and again for what is new to it.

    Args:
        formula: a function of tensors, and of options by which each combination gets code of its own: those whose
            annotation names no Tensor.
    """
    parameters = inspect.signature(formula).parameters.values()
    options = [parameter.name for parameter in parameters if "Tensor" not in str(parameter.annotation)]
    # Not `fullgraph`: beyond the limit of graphs for one function the formula runs op by op.
    fused = fuse(formula, backend="inductor", fallback=(), static_argnames=options)

    # Dynamo may come by in a frame that it could not compile, and knows no way through what calls it again.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @functools.wraps(formula)
    def call(*arguments: Any) -> Any:
        # Below autograd nothing needs a gradient, and autocast is about matmuls: neither shall make another graph.
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return call_whatever_the_stance(fused, *map(_as_compiled, arguments))

    return call  # type: ignore[no-any-return]


def _as_compiled(argument: Any) -> Any:
    # Each new layout of a tensor would be compiled for itself. Lists come from torch, which knows no tuples; options
    # have to be hashable.
    if isinstance(argument, Tensor):
        return argument.detach().contiguous()
    return tuple(map(_as_compiled, argument)) if isinstance(argument, list) else argument


def why_not_compiled(device: torch.device) -> str | None:
    """Return None if formulas can be compiled for `device`, else what is missing."""
    if device.type != "cpu":
        return f"the ops' compiled form is for a CPU, got {device.type}; fuse(op, backend='inductor') compiles there"
    if INTERPRETED:
        return "TRITON_INTERPRET is set, and the kernels take its place"
    return why_inductor_is_unavailable("cpu")
