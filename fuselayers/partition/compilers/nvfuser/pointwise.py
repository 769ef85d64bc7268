"""Elementwise ops."""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.fx as fx

from .builder import (
    NAMES_OF_DTYPES,
    Builder,
    Rule,
    Value,
    argument_of,
    computed_in,
    is_number,
    is_size,
    source_of,
    tensor_of,
)

_aten: Final = torch.ops.aten

_FLOATS: Final = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_INTEGERS: Final = (torch.int64, torch.int32)


def _has(count: int, *dtypes: torch.dtype) -> Callable[[fx.Node], bool]:
    """Whether the first arguments are tensors, numbers and sizes, at least one a tensor, and the result has a dtype."""

    def accepts(node: fx.Node) -> bool:
        operands = node.args[:count]
        tensors = [one for one in operands if isinstance(one, fx.Node) and isinstance(one.meta["val"], torch.Tensor)]
        known = all(is_number(one) or one in tensors or is_size(one) for one in operands)
        fits = not dtypes or tensor_of(node).dtype in dtypes
        return len(operands) == count and bool(tensors) and known and fits

    return accepts


def _arithmetic(name: str, count: int, *dtypes: torch.dtype) -> Rule:
    """An op that computes in the dtype of its result, as add and exp do, for the dtypes that nvFuser has it for."""

    def emit(builder: Builder, node: fx.Node) -> Value:
        handle = getattr(builder.ops, name)(*builder.operands(node, count))
        return Value(handle, computed_in(tensor_of(node).dtype))

    return Rule(emit, accepts=_has(count, *(dtypes or (*_FLOATS, *_INTEGERS))))


def _product(builder: Builder, node: fx.Node) -> Value:
    name = "logical_and" if tensor_of(node).dtype == torch.bool else "mul"
    return Value(getattr(builder.ops, name)(*builder.operands(node, 2)), computed_in(tensor_of(node).dtype))


def _with_alpha(name: str) -> Rule:
    """add and sub: the second operand may have a factor."""

    def emit(builder: Builder, node: fx.Node) -> Value:
        dtype = computed_in(tensor_of(node).dtype)
        left, right = builder.operands(node, 2)
        alpha = argument_of(node, 2, "alpha", 1)
        if alpha != 1:
            right = builder.ops.mul(right, builder.number(alpha, dtype))
        return Value(getattr(builder.ops, name)(left, right), dtype)

    has_operands = _has(2, *_FLOATS, *_INTEGERS)
    return Rule(emit, accepts=lambda node: is_number(argument_of(node, 2, "alpha", 1)) and has_operands(node))


def _comparison(name: str) -> Rule:
    """An op that compares in the dtype to which its operands are promoted."""

    def emit(builder: Builder, node: fx.Node) -> Value:
        promoted, rank = _promoted(node), tensor_of(node).dim()
        operands = [
            builder.operand(_rounded(argument, promoted), computed_in(promoted), rank) for argument in node.args[:2]
        ]
        return Value(getattr(builder.ops, name)(*operands), torch.bool)

    return Rule(emit, accepts=lambda node: _promoted(node) in NAMES_OF_DTYPES)


def _rounded(argument: Any, dtype: torch.dtype) -> Any:
    """A number rounded to half precision, where torch compares in it: a bfloat16 tensor of 0.1 equals 0.1."""
    rounds = is_number(argument) and computed_in(dtype) != dtype
    return torch.tensor(argument, dtype=dtype).item() if rounds else argument


def _promoted(node: fx.Node) -> torch.dtype:
    operands: Any = node.args[:2]
    left, right = (value.meta["val"] if isinstance(value, fx.Node) else value for value in operands)
    return torch.result_type(left, right)


def _logical(name: str, count: int) -> Rule:
    """An op on whether its operands are zero."""

    def emit(builder: Builder, node: fx.Node) -> Value:
        return Value(getattr(builder.ops, name)(*builder.operands(node, count)), torch.bool)

    return Rule(emit, accepts=_has(count))


def _float_test(name: str) -> Rule:
    """isnan and its like."""

    def emit(builder: Builder, node: fx.Node) -> Value:
        return Value(getattr(builder.ops, name)(builder.value(source_of(node)).handle), torch.bool)

    return Rule(emit, accepts=lambda node: tensor_of(source_of(node)).dtype in _FLOATS)


_POWERS: Final = {0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}


def _power(builder: Builder, node: fx.Node) -> Value:
    dtype = computed_in(tensor_of(node).dtype)
    x = builder.operand(node.args[0], dtype, tensor_of(node).dim())
    exponent: Any = node.args[1]
    # Common powers have cheaper operations.
    if exponent in (1, 2, 3):
        return Value(functools.reduce(builder.ops.mul, [x] * int(exponent)), dtype)
    if exponent in _POWERS:
        return Value(getattr(builder.ops, _POWERS[exponent])(x), dtype)
    return Value(builder.ops.pow(x, builder.number(exponent, dtype)), dtype)


def _accepts_power(node: fx.Node) -> bool:
    return is_number(node.args[1]) and tensor_of(node).dtype in _FLOATS


def _sign(builder: Builder, node: fx.Node) -> Value:
    # Two comparisons give 0 for nan, as torch does.
    dtype = computed_in(tensor_of(node).dtype)
    (x,), zero = builder.operands(node, 1), builder.number(0, dtype)
    above = builder.cast(Value(builder.ops.gt(x, zero), torch.bool), dtype)
    below = builder.cast(Value(builder.ops.lt(x, zero), torch.bool), dtype)
    return Value(builder.ops.sub(above.handle, below.handle), dtype)


def _where(builder: Builder, node: fx.Node) -> Value:
    dtype, rank = computed_in(tensor_of(node).dtype), tensor_of(node).dim()
    condition = builder.operand(node.args[0], torch.bool, rank)
    return Value(builder.ops.where(condition, *(builder.operand(one, dtype, rank) for one in node.args[1:3])), dtype)


def _accepts_where(node: fx.Node) -> bool:
    condition = node.args[0]
    return isinstance(condition, fx.Node) and tensor_of(condition).dtype == torch.bool and _has(3)(node)


def _clamp(builder: Builder, node: fx.Node) -> Value:
    # maximum and minimum propagate nan, and either bound may be missing.
    dtype, rank = computed_in(tensor_of(node).dtype), tensor_of(node).dim()
    handle = builder.operand(node.args[0], dtype, rank)
    lowest, highest = _bounds(node)
    if lowest is not None:
        handle = builder.ops.maximum(handle, builder.operand(lowest, dtype, rank))
    if highest is not None:
        handle = builder.ops.minimum(handle, builder.operand(highest, dtype, rank))
    return Value(handle, dtype)


def _bounds(node: fx.Node) -> tuple[Any, Any]:
    packet = getattr(node.target, "overloadpacket", None)
    if packet in (_aten.clamp_min, _aten.clamp_max):
        return (node.args[1], None) if packet is _aten.clamp_min else (None, node.args[1])
    return argument_of(node, 1, "min", None), argument_of(node, 2, "max", None)


def _accepts_clamp(node: fx.Node) -> bool:
    given = [bound for bound in _bounds(node) if bound is not None]
    known = (is_number(bound) or (isinstance(bound, fx.Node) and not is_size(bound)) for bound in given)
    return bool(given) and all(known) and tensor_of(node).dtype != torch.bool


def _convert(builder: Builder, node: fx.Node) -> Value:
    # To half precision nothing happens here: the value is rounded where it leaves the definition.
    return builder.cast(builder.value(source_of(node)), computed_in(tensor_of(node).dtype))


def _accepts_copy(node: fx.Node) -> bool:
    moved = {"device", "layout", "pin_memory"} & {name for name, value in node.kwargs.items() if value is not None}
    same = tensor_of(source_of(node)).device == tensor_of(node).device and tensor_of(node).layout == torch.strided
    return same and moved <= {"device", "layout"}


def _overloads(rule: Rule, overloads: str, *names: str) -> dict[Any, Rule]:
    return _each(lambda name: rule, overloads, *names)


def _each(rule_of: Callable[[str], Rule], overloads: str, *names: str) -> dict[Any, Rule]:
    return {getattr(getattr(_aten, name), overload): rule_of(name) for name in names for overload in overloads.split()}


_ANGLES: Final = ("acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "sin", "sinh", "tan", "tanh")
_EXPONENTIALS: Final = ("exp", "exp2", "expm1", "log", "log10", "log1p", "log2", "sigmoid", "silu")
_ROUNDINGS: Final = ("ceil", "floor", "frac", "round", "trunc")
# nvFuser's relu of integers goes through float32 and loses digits.
_FLOAT_FUNCTIONS: Final = ("erf", "erfc", "lgamma", "reciprocal", "relu", "rsqrt", "sqrt", *_ANGLES, *_EXPONENTIALS)

_LEFT: Final = _arithmetic("bitwise_left_shift", 2, *_INTEGERS)
_RIGHT: Final = _arithmetic("bitwise_right_shift", 2, *_INTEGERS)

_table: dict[Any, Rule] = {
    **{getattr(_aten, name).default: _arithmetic(name, 1, *_FLOATS) for name in (*_FLOAT_FUNCTIONS, *_ROUNDINGS)},
    **{getattr(_aten, name).default: _float_test(name) for name in ("isinf", "isnan", "isneginf", "isposinf")},
    **{getattr(_aten, name).default: _arithmetic(name, 1) for name in ("abs", "neg")},
    **{getattr(_aten, name).default: _arithmetic(name, 2) for name in ("maximum", "minimum")},
    **_overloads(_with_alpha("add"), "Tensor Scalar", "add"),
    **_overloads(_with_alpha("sub"), "Tensor Scalar", "sub"),
    **_overloads(Rule(_product, accepts=_has(2)), "Tensor Scalar", "mul"),
    **_overloads(_arithmetic("truediv", 2), "Tensor Scalar", "div"),
    **_overloads(_arithmetic("fmod", 2, *_FLOATS), "Tensor Scalar", "fmod"),
    **_overloads(_arithmetic("remainder", 2, *_FLOATS), "Tensor Scalar", "remainder"),
    **_overloads(_arithmetic("pow", 2, *_FLOATS), "Tensor_Tensor Scalar", "pow"),
    _aten.pow.Tensor_Scalar: Rule(_power, accepts=_accepts_power),
    _aten.atan2.default: _arithmetic("atan2", 2, *_FLOATS),
    **_each(_comparison, "Tensor Scalar", "eq", "ge", "gt", "le", "lt", "ne"),
    **{getattr(_aten, name).default: _logical(name, 2) for name in ("logical_and", "logical_or")},
    _aten.logical_not.default: _logical("logical_not", 1),
    **_each(
        lambda name: _arithmetic(name, 2, *_INTEGERS, torch.bool),
        "Tensor Scalar",
        *("bitwise_and", "bitwise_or", "bitwise_xor"),
    ),
    _aten.bitwise_not.default: _arithmetic("bitwise_not", 1, *_INTEGERS, torch.bool),
    **_overloads(_LEFT, "Tensor Tensor_Scalar", "bitwise_left_shift"),
    **_overloads(_LEFT, "Tensor Scalar", "__lshift__"),
    **_overloads(_RIGHT, "Tensor Tensor_Scalar", "bitwise_right_shift"),
    **_overloads(_RIGHT, "Tensor Scalar", "__rshift__"),
    **_overloads(Rule(_sign, accepts=_has(1, *_FLOATS, *_INTEGERS)), "default", "sgn", "sign"),
    _aten.where.self: Rule(_where, accepts=_accepts_where),
    **_overloads(Rule(_clamp, accepts=_accepts_clamp), "default Tensor", "clamp", "clamp_min", "clamp_max"),
    torch.ops.prims.convert_element_type.default: Rule(_convert),
    _aten._to_copy.default: Rule(_convert, accepts=_accepts_copy),
}

POINTWISE: Final[Mapping[Any, Rule]] = MappingProxyType(_table)
