"""Graphs and regions of functions, without what stands around them when `fuse` makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fuselayers.partition.compilers.nvfuser.definitions import Region
from fuselayers.partition.compilers.nvfuser.regions import rule_of

__all__ = ["CPU", "as_tuple", "graph_of", "region_of"]

CPU = torch.device("cpu")


def graph_of(fn: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    """The graph of a function of tensors, in ATen's ops, with values on fake tensors."""
    return make_fx(fn, tracing_mode="fake")(*inputs)


def as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def region_of(fn: Callable[..., Any], *inputs: Tensor) -> Region:
    """The whole of a function as one region."""
    module = graph_of(lambda *given: as_tuple(fn(*given)), *inputs)
    for node in module.graph.nodes:
        assert node.op != "call_function" or rule_of(node, CPU) is not None, node.format_node()
    return Region(module, CPU)
