"""The elementwise ops and reductions of transformers. torch runs all others, each as a separate kernel."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import torch.fx as fx

from ...node_kinds import arguments_of
from .builder import (
    NAMES_OF_DTYPES,
    Builder,
    Translation,
    Value,
    computed_in,
    is_number,
    source_of,
    tensor_of,
)

_aten: Final = torch.ops.aten

_FLOATS: Final = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_INTEGERS: Final = (torch.int64, torch.int32)


def _has(count: int, *dtypes: torch.dtype) -> Callable[[fx.Node], bool]:
    """Return a check: the first `count` arguments are tensors or numbers, at least one is a tensor, and the result has
    one of the dtypes, if any are given."""

    def accepts(node: fx.Node) -> bool:
        operands = node.args[:count]
        tensors = [operand for operand in operands if isinstance(operand, fx.Node)]
        known = all(is_number(operand) or operand in tensors for operand in operands)
        fits = not dtypes or tensor_of(node).dtype in dtypes
        return len(operands) == count and bool(tensors) and known and fits

    return accepts


def _arithmetic(name: str, count: int, *dtypes: torch.dtype) -> Translation:
    """The translation of an op that computes in the dtype of its result: one of `dtypes`, or any if none is given."""
    has_operands = _has(count, *dtypes)

    def emit(builder: Builder, node: fx.Node) -> Value:
        dtype, rank = computed_in(tensor_of(node).dtype), tensor_of(node).dim()
        operands = [builder.operand(argument, dtype, rank) for argument in node.args[:count]]
        return Value(getattr(builder.ops, name)(*operands), dtype)

    # torch runs an add or a sub with a factor.
    return Translation(emit, accepts=lambda node: has_operands(node) and arguments_of(node).get("alpha", 1) == 1)


def _comparison(name: str) -> Translation:
    """The translation of an op that compares in the dtype to which its operands are promoted."""

    def emit(builder: Builder, node: fx.Node) -> Value:
        promoted, rank = _promoted(node), tensor_of(node).dim()
        operands = [
            builder.operand(_rounded(argument, promoted), computed_in(promoted), rank) for argument in node.args[:2]
        ]
        return Value(getattr(builder.ops, name)(*operands), torch.bool)

    return Translation(emit, accepts=lambda node: _promoted(node) in NAMES_OF_DTYPES)


def _rounded(argument: Any, dtype: torch.dtype) -> Any:
    """A number rounded to half precision, where torch compares in it: a bfloat16 tensor of 0.1 equals 0.1."""
    rounds = is_number(argument) and computed_in(dtype) != dtype
    return torch.tensor(argument, dtype=dtype).item() if rounds else argument


def _promoted(node: fx.Node) -> torch.dtype:
    operands: Any = node.args[:2]
    left, right = (value.meta["val"] if isinstance(value, fx.Node) else value for value in operands)
    return torch.result_type(left, right)


def _power(builder: Builder, node: fx.Node) -> Value:
    dtype = computed_in(tensor_of(node).dtype)
    x = builder.operand(node.args[0], dtype, tensor_of(node).dim())
    exponent: Any = node.args[1]
    if exponent in (1, 2, 3):
        return Value(functools.reduce(builder.ops.mul, [x] * int(exponent)), dtype)
    return Value(builder.ops.pow(x, builder.number(exponent, dtype)), dtype)


def _where(builder: Builder, node: fx.Node) -> Value:
    dtype, rank = computed_in(tensor_of(node).dtype), tensor_of(node).dim()
    condition = builder.operand(node.args[0], torch.bool, rank)
    operands = (builder.operand(argument, dtype, rank) for argument in node.args[1:3])
    return Value(builder.ops.where(condition, *operands), dtype)


def _accepts_where(node: fx.Node) -> bool:
    condition = node.args[0]
    return isinstance(condition, fx.Node) and tensor_of(condition).dtype == torch.bool and _has(3)(node)


def _convert(builder: Builder, node: fx.Node) -> Value:
    # A value is not rounded to half precision here, but where it leaves the definition.
    return builder.cast(builder.values[source_of(node)], computed_in(tensor_of(node).dtype))


def _accepts_copy(node: fx.Node) -> bool:
    stays = tensor_of(source_of(node)).device == tensor_of(node).device
    return stays and node.kwargs.get("pin_memory") is None


def _dims(node: fx.Node) -> list[int]:
    """The dimensions that are reduced, in ascending order; all of them if none are named."""
    rank = tensor_of(source_of(node)).dim()
    dims = arguments_of(node).get("dim")
    dims = [dims] if isinstance(dims, int) else list(dims or range(rank))
    return sorted(dim % rank for dim in dims)


def _reduction(name: str) -> Translation:
    def emit(builder: Builder, node: fx.Node) -> Value:
        dtype = computed_in(tensor_of(node).dtype)
        operand = builder.cast(builder.values[source_of(node)], dtype).handle
        keepdim = bool(arguments_of(node).get("keepdim", False))
        return Value(getattr(builder.ops, name)(operand, _dims(node), keepdim), dtype)

    def accepts(node: fx.Node) -> bool:
        # A tensor without dimensions has nothing to reduce. nvFuser gives a sum of integers another dtype than torch.
        return tensor_of(source_of(node)).dim() > 0 and tensor_of(node).dtype.is_floating_point

    return Translation(emit, accepts=accepts)


def _var_mean(builder: Builder, node: fx.Node) -> tuple[Value, ...]:
    dtype = computed_in(node.meta["val"][0].dtype)
    # torch's default correction is 1.
    correction: Any = node.kwargs.get("correction")
    options = 1 if correction is None else int(correction), bool(node.kwargs.get("keepdim", False))
    handles = builder.ops.var_mean(builder.values[source_of(node)].handle, _dims(node), *options)
    return tuple(Value(handle, dtype) for handle in handles)


def _accepts_variance(node: fx.Node) -> bool:
    correction = node.kwargs.get("correction")
    whole = correction is None or (isinstance(correction, int | float) and correction == int(correction))
    x = tensor_of(source_of(node))
    return whole and x.dim() > 0 and x.dtype.is_floating_point


def _each(make: Callable[[str], Translation], names: str, overloads: str = "default") -> dict[Any, Translation]:
    ops = [(getattr(_aten, name), make(name)) for name in names.split()]
    return {getattr(op, overload): translation for op, translation in ops for overload in overloads.split()}


ARITHMETIC: Final[Mapping[Any, Translation]] = {
    # nvFuser's relu of integers goes through float32 and loses digits.
    **_each(
        lambda name: _arithmetic(name, 1, *_FLOATS),
        "cos erf exp log log1p reciprocal relu rsqrt sigmoid silu sin sqrt tanh",
    ),
    **_each(lambda name: _arithmetic(name, 1, *_FLOATS, *_INTEGERS), "abs neg"),
    **_each(lambda name: _arithmetic(name, 2, *_FLOATS, *_INTEGERS), "add sub mul", "Tensor Scalar"),
    **_each(lambda name: _arithmetic("truediv", 2, *_FLOATS), "div", "Tensor Scalar"),
    _aten.pow.Tensor_Scalar: Translation(
        _power, accepts=lambda node: is_number(node.args[1]) and tensor_of(node).dtype in _FLOATS
    ),
    **_each(_comparison, "eq ge gt le lt ne", "Tensor Scalar"),
    _aten.logical_and.default: _arithmetic("logical_and", 2),
    _aten.where.self: Translation(_where, accepts=_accepts_where),
    torch.ops.prims.convert_element_type.default: Translation(_convert),
    _aten._to_copy.default: Translation(_convert, accepts=_accepts_copy),
    _aten.sum.default: _reduction("sum"),
    _aten.sum.dim_IntList: _reduction("sum"),
    _aten.amax.default: _reduction("max"),
    _aten.var_mean.correction: Translation(_var_mean, accepts=_accepts_variance),
}
