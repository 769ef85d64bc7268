"""Graphs and regions of functions, made without `fuse`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fuselayers.partition.compilers.nvfuser.definitions import Region
from fuselayers.partition.compilers.nvfuser.regions import rule_of
from tests.partition.compilers.nvfuser.interpreter import StandIn

__all__ = ["CPU", "as_tuple", "assert_op", "graph_of", "region_of", "script_of"]

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


def script_of(stand_in: StandIn, fn: Callable[..., Any], *inputs: Any) -> list[str]:
    """Run a function as one region, and return the calls that define it."""
    region_of(fn, *inputs)(*inputs)
    return stand_in.defined[-1].script().splitlines()


def assert_op(target: Any, arguments: Sequence[Any], named: Mapping[str, Any], stand_in: StandIn) -> None:
    """Fail unless a region holds the op, and computes what torch computes.

    The inputs are computed in the region, so that views are in its middle.
    """
    places = [place for place, one in enumerate(arguments) if isinstance(one, Tensor)]
    lists = isinstance(arguments[0], list) and isinstance(arguments[0][0], Tensor)
    given = arguments[0] if lists else [arguments[place] for place in places] or [torch.ones(2)]

    def fn(*tensors: Tensor) -> Any:
        tensors = tuple(one.neg().neg() if one.is_floating_point() else ~(~one) for one in tensors)
        filled: list[Any] = [list(tensors), *arguments[1:]] if lists else list(arguments)
        for place, tensor in zip(places, tensors, strict=False):
            filled[place] = tensor
        made = target(*filled, **named)
        return tuple(made) if isinstance(made, list | tuple) else made

    region = region_of(fn, *given)
    if target is torch.ops.aten.detach.default and torch.__version__ >= "2.14":
        pytest.skip("torch traces an alias instead")
    assert region.graph.find_nodes(op="call_function", target=target), f"{target} is decomposed before it is traced"
    results = region(*given)
    expected = target(*arguments, **named)
    expected = tuple(expected) if isinstance(expected, list) else as_tuple(expected)
    torch.testing.assert_close(tuple(results), expected, equal_nan=True)
    assert stand_in.executions == 1
