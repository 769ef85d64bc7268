"""Sums, maxima and variances over dimensions."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.fx as fx

from .builder import Builder, Rule, Value, argument_of, computed_in, source_of, tensor_of

_aten: Final = torch.ops.aten


def _dims(node: fx.Node) -> list[int]:
    """The dimensions that are reduced, in ascending order; all of them if none are named."""
    rank = tensor_of(source_of(node)).dim()
    dims = argument_of(node, 1, "dim", None)
    dims = [dims] if isinstance(dims, int) else list(dims or range(rank))
    return sorted(dim % rank for dim in dims)


def _reduction(name: str) -> Rule:
    def emit(builder: Builder, node: fx.Node) -> Value:
        dtype = computed_in(tensor_of(node).dtype)
        operand = builder.cast(builder.value(source_of(node)), dtype).handle
        keepdim = bool(argument_of(node, 2, "keepdim", False))
        return Value(getattr(builder.ops, name)(operand, _dims(node), keepdim), dtype)

    return Rule(emit, accepts=_accepts)


def _accepts(node: fx.Node) -> bool:
    # A tensor without dimensions has nothing to reduce, and nvFuser gives a sum of integers another dtype than torch.
    return tensor_of(source_of(node)).dim() > 0 and tensor_of(node).dtype.is_floating_point


def _var_mean(builder: Builder, node: fx.Node) -> tuple[Value, ...]:
    dtype = computed_in(node.meta["val"][0].dtype)
    # torch's default correction is 1.
    correction: Any = node.kwargs.get("correction")
    options = 1 if correction is None else int(correction), bool(node.kwargs.get("keepdim", False))
    handles = builder.ops.var_mean(builder.value(source_of(node)).handle, _dims(node), *options)
    return tuple(Value(handle, dtype) for handle in handles)


def _accepts_variance(node: fx.Node) -> bool:
    correction = node.kwargs.get("correction")
    whole = correction is None or (isinstance(correction, int | float) and correction == int(correction))
    x = tensor_of(source_of(node))
    return whole and x.dim() > 0 and x.dtype.is_floating_point


REDUCTIONS: Final[Mapping[Any, Rule]] = MappingProxyType(
    {
        _aten.sum.default: _reduction("sum"),
        _aten.sum.dim_IntList: _reduction("sum"),
        _aten.amax.default: _reduction("max"),
        _aten.var_mean.correction: Rule(_var_mean, accepts=_accepts_variance),
    }
)
