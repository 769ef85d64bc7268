"""Elementwise ops, by their names in nvFuser."""

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

__all__ = ["POINTWISE"]

_aten: Final = torch.ops.aten


def _in_own_dtype(name: str, places: int) -> Rule:
    """An op whose operands are computed with in the dtype of the result, as add, exp and the like are."""

    def emit(builder: Builder, node: fx.Node) -> Value:
        dtype, rank = computed_in(tensor_of(node).dtype), tensor_of(node).dim()
        operands = [builder.operand(argument, dtype, rank) for argument in node.args[:places]]
        return Value(getattr(builder.ops, name)(*operands), dtype)

    # Of booleans, a maximum is another op.
    return Rule(emit, accepts=lambda node: tensor_of(node).dtype != torch.bool and _has(places)(node))


def _product(builder: Builder, node: fx.Node) -> Value:
    rule = _on_booleans("logical_and", 2) if tensor_of(node).dtype == torch.bool else _in_own_dtype("mul", 2)
    value = rule.emit(builder, node)
    assert isinstance(value, Value)
    return value


def _on_floats(name: str, places: int = 1) -> Rule:
    """The same for an op that nvFuser has for floats only."""
    rule = _in_own_dtype(name, places)
    return Rule(rule.emit, accepts=lambda node: tensor_of(node).dtype.is_floating_point and _has(places)(node))


def _on_integers(name: str, places: int) -> Rule:
    """The same for an op that nvFuser has for integers only."""
    rule = _in_own_dtype(name, places)
    whole = (torch.int64, torch.int32)
    return Rule(rule.emit, accepts=lambda node: tensor_of(node).dtype in whole and _has(places)(node))


def _with_alpha(name: str) -> Rule:
    """add and sub: the second operand may come with a factor."""

    def emit(builder: Builder, node: fx.Node) -> Value:
        dtype, rank = computed_in(tensor_of(node).dtype), tensor_of(node).dim()
        left, right = (builder.operand(argument, dtype, rank) for argument in node.args[:2])
        alpha = argument_of(node, 2, "alpha", 1)
        if alpha != 1:
            right = builder.ops.mul(right, builder.number(alpha, dtype))
        return Value(getattr(builder.ops, name)(left, right), dtype)

    def accepts(node: fx.Node) -> bool:
        boolean = tensor_of(node).dtype == torch.bool  # where adding is another op
        return not boolean and not isinstance(argument_of(node, 2, "alpha", 1), fx.Node) and _has(2)(node)

    return Rule(emit, accepts=accepts)


def _comparison(name: str) -> Rule:
    """An op that compares in the dtype that its operands are promoted to."""

    def emit(builder: Builder, node: fx.Node) -> Value:
        promoted, rank = _promoted(node), tensor_of(node).dim()
        operands = [
            builder.operand(_rounded(argument, promoted), computed_in(promoted), rank) for argument in node.args[:2]
        ]
        return Value(getattr(builder.ops, name)(*operands), torch.bool)

    return Rule(emit, accepts=lambda node: _promoted(node) in NAMES_OF_DTYPES)


def _rounded(argument: Any, dtype: torch.dtype) -> Any:
    """A number as a half precision holds it: by that torch goes, so that 0.1 equals a tensor of it."""
    rounds = is_number(argument) and computed_in(dtype) != dtype
    return torch.tensor(argument, dtype=dtype).item() if rounds else argument


def _promoted(node: fx.Node) -> torch.dtype:
    operands: Any = node.args[:2]
    left, right = (value.meta["val"] if isinstance(value, fx.Node) else value for value in operands)
    return torch.result_type(left, right)


def _on_booleans(name: str, places: int) -> Rule:
    """An op that looks at whether its operands are zero."""

    def emit(builder: Builder, node: fx.Node) -> Value:
        operands = [builder.operand(argument, torch.bool, tensor_of(node).dim()) for argument in node.args[:places]]
        return Value(getattr(builder.ops, name)(*operands), torch.bool)

    return Rule(emit, accepts=_has(places))


def _on_bits(name: str) -> Rule:
    rule = _in_own_dtype(name, 2)
    return Rule(rule.emit, accepts=lambda node: not tensor_of(node).dtype.is_floating_point)


def _asks(name: str) -> Rule:
    """isnan and its kin, which look at a float."""

    def emit(builder: Builder, node: fx.Node) -> Value:
        return Value(getattr(builder.ops, name)(builder.value(source_of(node)).handle), torch.bool)

    return Rule(emit, accepts=lambda node: tensor_of(source_of(node)).dtype.is_floating_point)


def _has(places: int) -> Callable[[fx.Node], bool]:
    """Whether the first arguments are tensors and numbers, one tensor at least among them."""

    def accepts(node: fx.Node) -> bool:
        operands = node.args[:places]
        tensors = [one for one in operands if isinstance(one, fx.Node) and isinstance(one.meta["val"], torch.Tensor)]
        known = all(is_number(one) or one in tensors or is_size(one) for one in operands)
        return len(operands) == places and bool(tensors) and known

    return accepts


def _power(builder: Builder, node: fx.Node) -> Value:
    dtype = computed_in(tensor_of(node).dtype)
    x = builder.operand(node.args[0], dtype, tensor_of(node).dim())
    exponent = node.args[1]
    # The powers that formulas are full of, without the general function.
    if exponent == 1:
        return Value(x, dtype)
    if exponent == 2:
        return Value(builder.ops.mul(x, x), dtype)
    if exponent == 3:
        return Value(builder.ops.mul(builder.ops.mul(x, x), x), dtype)
    if exponent == 0.5:
        return Value(builder.ops.sqrt(x), dtype)
    if exponent == -0.5:
        return Value(builder.ops.rsqrt(x), dtype)
    if exponent == -1:
        return Value(builder.ops.reciprocal(x), dtype)
    return Value(builder.ops.pow(x, builder.number(exponent, dtype)), dtype)


def _accepts_power(node: fx.Node) -> bool:
    return is_number(node.args[1]) and tensor_of(node).dtype.is_floating_point


def _sign(builder: Builder, node: fx.Node) -> Value:
    # In two comparisons, so that the sign of nan is 0, as in torch.
    dtype = computed_in(tensor_of(node).dtype)
    x = builder.operand(node.args[0], dtype, tensor_of(node).dim())
    zero = builder.number(0, dtype)
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
    # Two steps, so that nan stays nan and either bound may be missing.
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
    # To a half precision it is nothing here: the value is rounded where it leaves the definition.
    return builder.cast(builder.value(source_of(node)), computed_in(tensor_of(node).dtype))


def _accepts_copy(node: fx.Node) -> bool:
    moved = {"device", "layout", "pin_memory"} & {name for name, value in node.kwargs.items() if value is not None}
    same = tensor_of(source_of(node)).device == tensor_of(node).device and tensor_of(node).layout == torch.strided
    return same and moved <= {"device", "layout"}


def _overloads(packet: Any, *names: str) -> tuple[Any, ...]:
    return tuple(getattr(packet, name) for name in names)


_BOTH: Final = ("Tensor", "Scalar")
_OF_ANGLES: Final = ("acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "sin", "sinh", "tan", "tanh")
_EXPONENTIALS: Final = ("exp", "exp2", "expm1", "log", "log10", "log1p", "log2", "sigmoid", "silu")
_ROUNDINGS: Final = ("ceil", "floor", "frac", "round", "trunc")
# Of integers nvFuser has a relu too, which goes through float32 and loses digits.
_FLOAT_FUNCTIONS: Final = ("erf", "erfc", "lgamma", "reciprocal", "relu", "rsqrt", "sqrt", *_OF_ANGLES, *_EXPONENTIALS)

_table: dict[Any, Rule] = {
    **{getattr(_aten, name).default: _on_floats(name) for name in (*_FLOAT_FUNCTIONS, *_ROUNDINGS)},
    **{getattr(_aten, name).default: _asks(name) for name in ("isinf", "isnan", "isneginf", "isposinf")},
    **{getattr(_aten, name).default: _in_own_dtype(name, 1) for name in ("abs", "neg")},
    **{one: _with_alpha("add") for one in _overloads(_aten.add, *_BOTH)},
    **{one: _with_alpha("sub") for one in _overloads(_aten.sub, *_BOTH)},
    **{one: Rule(_product, accepts=_has(2)) for one in _overloads(_aten.mul, *_BOTH)},
    **{one: _in_own_dtype("truediv", 2) for one in _overloads(_aten.div, *_BOTH)},
    **{getattr(_aten, name).default: _in_own_dtype(name, 2) for name in ("maximum", "minimum")},
    _aten.atan2.default: _on_floats("atan2", 2),
    **{
        getattr(getattr(_aten, name), overload): _comparison(name)
        for name in ("eq", "ge", "gt", "le", "lt", "ne")
        for overload in _BOTH
    },
    **{getattr(_aten, name).default: _on_booleans(name, 2) for name in ("logical_and", "logical_or")},
    _aten.logical_not.default: _on_booleans("logical_not", 1),
    **{
        getattr(getattr(_aten, name), overload): _on_bits(name)
        for name in ("bitwise_and", "bitwise_or", "bitwise_xor")
        for overload in _BOTH
    },
    **{
        getattr(getattr(_aten, name), overload): _on_integers(name, 2)
        for name in ("bitwise_left_shift", "bitwise_right_shift")
        for overload in ("Tensor", "Tensor_Scalar")
    },
    **{one: _on_integers("bitwise_left_shift", 2) for one in _overloads(_aten.__lshift__, *_BOTH)},
    **{one: _on_integers("bitwise_right_shift", 2) for one in _overloads(_aten.__rshift__, *_BOTH)},
    _aten.bitwise_not.default: Rule(
        _in_own_dtype("bitwise_not", 1).emit, accepts=lambda node: not tensor_of(node).dtype.is_floating_point
    ),
    _aten.pow.Tensor_Scalar: Rule(_power, accepts=_accepts_power),
    _aten.pow.Tensor_Tensor: _on_floats("pow", 2),
    _aten.pow.Scalar: _on_floats("pow", 2),
    **{one: _on_floats("fmod", 2) for one in _overloads(_aten.fmod, *_BOTH)},
    **{one: _on_floats("remainder", 2) for one in _overloads(_aten.remainder, *_BOTH)},
    _aten.sgn.default: Rule(_sign, accepts=lambda node: tensor_of(node).dtype != torch.bool),
    _aten.sign.default: Rule(_sign, accepts=lambda node: tensor_of(node).dtype != torch.bool),
    _aten.where.self: Rule(_where, accepts=_accepts_where),
    **{one: Rule(_clamp, accepts=_accepts_clamp) for one in _overloads(_aten.clamp, "default", "Tensor")},
    **{one: Rule(_clamp, accepts=_accepts_clamp) for one in _overloads(_aten.clamp_min, "default", "Tensor")},
    **{one: Rule(_clamp, accepts=_accepts_clamp) for one in _overloads(_aten.clamp_max, "default", "Tensor")},
    torch.ops.prims.convert_element_type.default: Rule(_convert),
    _aten._to_copy.default: Rule(_convert, accepts=_accepts_copy),
}

POINTWISE: Final[Mapping[Any, Rule]] = MappingProxyType(_table)
