"""The elementwise operations: which type each computes in, which it answers, and how torch computes it.

After nvFuser 0.2.36, `csrc/ops/arith.cpp` and `runtime/helpers.cu`. An operation that promotes computes half precision
in float *and answers float*. One that does not promote (relu, clamp, sum, ...) is generated for it as it is, and for
most of them nvFuser's run-time library has no half-precision function: the CUDA compiler refuses the kernel. So a cast
that was forgotten is seen either in an output's type or as an error.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.partition.compilers.nvfuser.data_types import DataType, common_type, promoted, to_torch
from tests.partition.compilers.nvfuser.values import Axis, Fusion, Scalar, TensorView, Val, checked

__all__ = [
    "ELEMENTWISE",
    "as_val",
    "cast",
    "compiled",
    "elementwise",
    "joined_axes",
    "promoted_elementwise",
    "same_sizes",
]

Function = Callable[..., Tensor]


def as_val(fusion: Fusion, value: Any) -> Val:
    """A value of the fusion: what was given, or the constant of a Python number."""
    return value if isinstance(value, Val) else fusion.constant(value)


def compiled(name: str, data_type: DataType) -> None:
    """Raises RuntimeError where the kernel of an operation in half precision does not compile."""
    checked(
        not data_type.is_reduced,
        f"{name} is not compiled for {data_type!r}: nvFuser's run time has no such function. Cast to Float first.",
    )


def _aligned(tensors: Sequence[TensorView]) -> list[list[Axis]]:
    """The axes that meet in each dimension, where tensors of a lower rank are broadcast in front."""
    rank = max(tensor.ndim for tensor in tensors)
    return [
        [tensor.axes[dim - rank + tensor.ndim] for tensor in tensors if dim >= rank - tensor.ndim]
        for dim in range(rank)
    ]


def _met(axes: Sequence[Axis]) -> Axis:
    """The axis of an output where these axes of its inputs meet."""
    kept = [axis for axis in axes if not axis.is_broadcast]
    if not kept:
        expanded = [axis for axis in axes if axis.is_expanded]
        return next((axis for axis in expanded if axis.size is not None), expanded[0]) if expanded else axes[0]
    sizes = [axis.size for axis in kept if axis.size is not None]
    checked(len(set(sizes)) <= 1, "Expected sizes to match: ", " vs ".join(map(str, sizes)), ".")
    kind = "iteration" if any(axis.kind == "iteration" for axis in kept) else "symbolic"
    return Axis(kind, sizes[0] if sizes else None)


def joined_axes(tensors: Sequence[TensorView]) -> tuple[Axis, ...]:
    """The axes of an elementwise operation's output. Raises RuntimeError where known sizes differ."""
    return tuple(map(_met, _aligned(tensors)))


def same_sizes(tensors: Sequence[TensorView], values: Sequence[Tensor]) -> None:
    """Raises RuntimeError unless the sizes agree, but for axes that were broadcast when the fusion was defined."""
    rank = max(tensor.ndim for tensor in tensors)
    for dim in range(rank):
        sizes: dict[int, None] = {}
        for tensor, value in zip(tensors, values, strict=True):
            own = dim - rank + tensor.ndim
            if own < 0:
                continue
            axis, size = tensor.axes[own], value.shape[own]
            if not (axis.may_stretch or (size == 1 and axis.kind != "iteration")):
                sizes[size] = None
        checked(
            len(sizes) <= 1,
            "Expected sizes to match: ",
            " vs ".join(map(str, sizes)),
            f" in dimension {dim}. A size that was not 1 when the fusion was defined is never broadcast.",
        )


def _through_int(function: Function) -> Function:
    """C++'s arithmetic of bools: as integers, and back."""
    return lambda *operands: function(*(one.to(torch.int64) for one in operands)) != 0


def elementwise(
    fusion: Fusion, function: Function, operands: Sequence[Val], answer: DataType, compute: DataType | None = None
) -> Any:
    """One elementwise operation: `function` of the operands, cast to `compute` if that is given, as an `answer`."""
    tensors = [one for one in operands if isinstance(one, TensorView)]
    types = [to_torch(one.data_type if compute is None else compute) for one in operands]
    answer_type = to_torch(answer)

    def computed(*values: Any) -> Tensor:
        if tensors:
            same_sizes(
                tensors, [value for one, value in zip(operands, values, strict=True) if isinstance(one, TensorView)]
            )
        cast_values = [
            value.to(dtype) if isinstance(value, Tensor) else torch.tensor(value, dtype=dtype)
            for value, dtype in zip(values, types, strict=True)
        ]
        made = function(*cast_values)
        assert isinstance(made, Tensor)
        return made.to(answer_type)

    if tensors:
        return fusion.tensor(answer, joined_axes(tensors), operands, computed)
    return fusion.scalar(answer, operands, lambda *values: computed(*values).item())


def _operand(one: Val) -> tuple[DataType, int | None]:
    return one.data_type, one.ndim if isinstance(one, TensorView) else None


def promoted_elementwise(
    fusion: Fusion,
    function: Function,
    operands: Sequence[Val],
    answer: DataType | None = None,
    *,
    integers_to_float: bool = False,
    full_precision: bool = False,
) -> Any:
    """An elementwise operation in the common type of its operands, and answering that unless `answer` is given."""
    common = common_type(
        [_operand(one) for one in operands], integers_to_float=integers_to_float, half_to_float=not full_precision
    )
    checked(
        not full_precision or common in (DataType.Float, DataType.Double),
        f"Promoted type must be single or double precision float but found {common!r}",
    )
    if common is DataType.Bool and answer is None:
        function = _through_int(function)
    return elementwise(fusion, function, operands, answer or common, common)


def cast(fusion: Fusion, arg: Any, dtype: DataType) -> Any:
    """The same values in another type; in the same type, the same memory."""
    value = as_val(fusion, arg)
    checked(dtype is not DataType.Null, f"Illegal Cast value from DataType: {value.data_type!r} to DataType: {dtype!r}")
    return elementwise(fusion, lambda operand: operand, [value], dtype)


def _maybe_cast(fusion: Fusion, value: Val, dtype: DataType) -> Val:
    return value if value.data_type is dtype else cast(fusion, value, dtype)


def _optionally_cast(fusion: Fusion, value: Val, dtype: DataType) -> Val:
    """A scalar stays as it is within its family: it is computed with, not stored."""
    if value.data_type is dtype or (isinstance(value, Scalar) and value.data_type.family == dtype.family != "bool"):
        return value
    made: Val = cast(fusion, value, dtype)
    return made


_Operation = Callable[..., Any]


def _kept(name: str, function: Function) -> _Operation:
    """Computes and answers in the type that it is given."""

    def operation(fusion: Fusion, x: Any) -> Any:
        value = as_val(fusion, x)
        compiled(name, value.data_type)
        return elementwise(fusion, function, [value], value.data_type)

    return operation


def _copied(fusion: Fusion, x: Any) -> Any:
    value = as_val(fusion, x)
    return elementwise(fusion, lambda operand: operand, [value], value.data_type)


def _floating(function: Function) -> _Operation:
    return lambda fusion, *operands: promoted_elementwise(
        fusion, function, [as_val(fusion, one) for one in operands], integers_to_float=True
    )


def _asking(name: str, function: Function) -> _Operation:
    def operation(fusion: Fusion, x: Any) -> Any:
        value = as_val(fusion, x)
        if name not in ("isfinite", "isreal"):
            compiled(name, value.data_type)
        return elementwise(fusion, function, [value], DataType.Bool)

    return operation


def _arithmetic(function: Function) -> _Operation:
    return lambda fusion, *operands: promoted_elementwise(fusion, function, [as_val(fusion, one) for one in operands])


def _comparison(function: Function) -> _Operation:
    return lambda fusion, *operands: promoted_elementwise(
        fusion, function, [as_val(fusion, one) for one in operands], DataType.Bool
    )


def _logical(function: Function) -> _Operation:
    def operation(fusion: Fusion, *operands: Any) -> Any:
        checked(not any(isinstance(one, complex) for one in operands), "a complex number is no bool")
        values = [_maybe_cast(fusion, as_val(fusion, one), DataType.Bool) for one in operands]
        return elementwise(fusion, function, values, DataType.Bool)

    return operation


def _bitwise(name: str, function: Function, of_bools: str) -> _Operation:
    def operation(fusion: Fusion, *operands: Any) -> Any:
        values = [as_val(fusion, one) for one in operands]
        for value in values:
            checked(
                value.data_type.family in ("integral", "bool"),
                f"Integer or boolean input is required for {name} but found {value.data_type!r}",
            )
        if all(value.data_type is DataType.Bool for value in values):
            return ELEMENTWISE[of_bools](fusion, *values)
        return promoted_elementwise(fusion, function, values)

    return operation


def _of_integers(function: Function) -> _Operation:
    def operation(fusion: Fusion, *operands: Any) -> Any:
        values = [as_val(fusion, one) for one in operands]
        checked(
            all(value.data_type.is_integral for value in values),
            f"input must have integral type, but got {' and '.join(repr(value.data_type) for value in values)}",
        )
        return promoted_elementwise(fusion, function, values)

    return operation


def _divided(x: Tensor, y: Tensor) -> Tensor:
    if x.dtype.is_floating_point or x.dtype.is_complex:
        return x / y
    return torch.div(x, y, rounding_mode="trunc")


def _relu(x: Tensor) -> Tensor:
    # nvFuser's relu of integers answers a float, which is cast back.
    return torch.relu(x) if x.dtype.is_floating_point else torch.relu(x).to(torch.float32)


def _frac(x: Tensor) -> Tensor:
    return x - torch.trunc(x)


def _mod(fusion: Fusion, x: Any, y: Any) -> Any:
    values = [as_val(fusion, one) for one in (x, y)]
    for value in values:
        # nvFuser defines it, and the CUDA compiler refuses `%` of floats later.
        checked(value.data_type.family in ("integral", "bool"), f"mod is not compiled for {value.data_type!r}")
    return promoted_elementwise(fusion, torch.fmod, values)


def _logical_not(fusion: Fusion, x: Any) -> Any:
    value = _maybe_cast(fusion, as_val(fusion, x), DataType.Bool)
    return elementwise(fusion, torch.logical_not, [value], DataType.Bool)


def _bitwise_not(fusion: Fusion, x: Any) -> Any:
    value = as_val(fusion, x)
    checked(
        value.data_type.family in ("integral", "bool"),
        f"input must have integral or boolean type, but got {value.data_type!r}",
    )
    if value.data_type is DataType.Bool:
        return _logical_not(fusion, value)
    return elementwise(fusion, torch.bitwise_not, [value], value.data_type)


_REAL_OF = {DataType.ComplexFloat: DataType.Float, DataType.ComplexDouble: DataType.Double}


def _abs(fusion: Fusion, x: Any) -> Any:
    value = as_val(fusion, x)
    function = torch.abs if value.data_type is not DataType.Bool else _through_int(torch.abs)
    return elementwise(fusion, function, [value], _REAL_OF.get(value.data_type, value.data_type))


def _real(fusion: Fusion, x: Any) -> Any:
    value = as_val(fusion, x)
    function = torch.real if value.data_type.is_complex else (lambda operand: operand)
    return elementwise(fusion, function, [value], _REAL_OF.get(value.data_type, value.data_type))


def _imag(fusion: Fusion, x: Any) -> Any:
    value = as_val(fusion, x)
    checked(value.data_type.is_complex, "imag not supported for non-complex tensors")
    return elementwise(fusion, torch.imag, [value], _REAL_OF[value.data_type])


def _complex(fusion: Fusion, real: Val, imaginary: Val) -> Any:
    checked(real.data_type is imaginary.data_type, "real and imag data type should be same in complex().")
    made = {parts: whole for whole, parts in _REAL_OF.items()}
    checked(real.data_type in made, f"Only support Float and Double, current type:{real.data_type!r}")
    ranks = [one.ndim if isinstance(one, TensorView) else None for one in (real, imaginary)]
    checked(ranks[0] == ranks[1], "complex() has the rank of its first operand, whatever the second one's is.")
    return elementwise(fusion, torch.complex, [real, imaginary], made[real.data_type])


def _signbit(fusion: Fusion, x: Any) -> Any:
    return promoted_elementwise(fusion, torch.signbit, [as_val(fusion, x)], DataType.Bool)


def _where(fusion: Fusion, condition: Any, x: Any, y: Any) -> Any:
    asked, first, second = (as_val(fusion, one) for one in (condition, x, y))
    checked(asked.data_type is DataType.Bool, f"Condition should be of DataType Bool, not {asked.data_type!r}")
    common = common_type([_operand(first), _operand(second)], half_to_float=False)
    chosen = [_optionally_cast(fusion, one, common) for one in (first, second)]
    dtype = to_torch(common)
    return elementwise(fusion, lambda c, a, b: torch.where(c, a.to(dtype), b.to(dtype)), [asked, *chosen], common)


def _sign(fusion: Fusion, x: Any) -> Any:
    value = as_val(fusion, x)
    zero, one, minus_one = (fusion.constant(number) for number in (0.0, 1.0, -1.0))
    negative = _where(fusion, ELEMENTWISE["lt"](fusion, value, zero), minus_one, zero)
    return cast(fusion, _where(fusion, ELEMENTWISE["gt"](fusion, value, zero), one, negative), value.data_type)


def _lerp(fusion: Fusion, start: Any, end: Any, weight: Any) -> Any:
    values = [as_val(fusion, one) for one in (start, end, weight)]
    shaped = [isinstance(one, TensorView) for one in values]
    checked(shaped != [False, False, True], "lerp() of two scalars is a scalar, whatever the weight is.")
    common = common_type([_operand(one) for one in values])
    cast_values = [_optionally_cast(fusion, one, common) for one in values]
    return elementwise(
        fusion, torch.lerp, cast_values, promoted(cast_values[0].data_type, cast_values[1].data_type), common
    )


def _addcmul(fusion: Fusion, first: Any, second: Any, third: Any, alpha: Any) -> Any:
    values = [as_val(fusion, one) for one in (first, second, third, alpha)]
    checked(isinstance(values[3], Scalar), "Alpha value should be a Scalar Valtype and not TensorView")
    common = common_type([_operand(one) for one in values[:3]])
    values = [_optionally_cast(fusion, one, common) for one in values]
    multiply, add = ELEMENTWISE["mul"], ELEMENTWISE["add"]
    return add(fusion, values[0], multiply(fusion, values[1], multiply(fusion, values[2], values[3])))


def _clamp(fusion: Fusion, x: Any, low: Any, high: Any) -> Any:
    value = as_val(fusion, x)
    checked(
        not isinstance(low, TensorView) and not isinstance(high, TensorView),
        "For Clamp operation: Min and Max values should be Scalars.",
    )
    compiled("clamp", value.data_type)
    limits = [
        _optionally_cast(fusion, as_val(fusion, limit), value.data_type) for limit in (low, high) if limit is not None
    ]

    def function(operand: Tensor, *given: Tensor) -> Tensor:
        left = list(given)
        if low is not None:
            operand = torch.maximum(operand, left.pop(0))
        return operand if high is None else torch.minimum(operand, left.pop(0))

    return elementwise(fusion, function, [value, *limits], value.data_type, value.data_type)


def _threshold(fusion: Fusion, x: Any, threshold: Any, replacement: Any) -> Any:
    checked(
        not isinstance(threshold, TensorView) and not isinstance(replacement, TensorView),
        "For Threshold operation: Thresh and Value values should be Scalars.",
    )
    checked(threshold is not None and replacement is not None, "threshold needs a threshold and a value, got None")
    value = as_val(fusion, x)
    compiled("threshold", value.data_type)
    limits = [_optionally_cast(fusion, as_val(fusion, one), value.data_type) for one in (threshold, replacement)]
    return elementwise(
        fusion, lambda a, t, v: torch.where(a <= t, v, a), [value, *limits], value.data_type, value.data_type
    )


def _logical_right_shift(fusion: Fusion, x: Any, shift: Any) -> Any:
    value, places = as_val(fusion, x), as_val(fusion, shift)
    bits = fusion.constant(64 if value.data_type is DataType.Int else 32)

    def of(name: str, *operands: Any) -> Any:
        return ELEMENTWISE[name](fusion, *operands)

    mask = of("where", of("ge", places, bits), -1, of("sub", of("pow", 2, places), 1))
    kept = of("bitwise_right_shift", value, places)
    cleared = of("bitwise_xor", of("bitwise_left_shift", mask, of("sub", bits, places)), kept)
    return of("where", of("signbit", value), cleared, kept)


ELEMENTWISE: Mapping[str, _Operation] = {
    **{
        name: _kept(name, function)
        for name, function in {
            "ceil": torch.ceil,
            "floor": torch.floor,
            "frac": _frac,
            "relu": _relu,
            "round": torch.round,
            "silu": torch.nn.functional.silu,
            "trunc": torch.trunc,
        }.items()
    },
    **{
        name: _floating(function)
        for name, function in {
            "acos": torch.acos,
            "acosh": torch.acosh,
            "asin": torch.asin,
            "asinh": torch.asinh,
            "atan": torch.atan,
            "atanh": torch.atanh,
            "cos": torch.cos,
            "cosh": torch.cosh,
            "exp": torch.exp,
            "exp2": torch.exp2,
            "expm1": torch.expm1,
            "erf": torch.erf,
            "erfc": torch.erfc,
            "erfinv": torch.erfinv,
            "erfcinv": lambda operand: torch.erfinv(1 - operand),
            "lgamma": torch.lgamma,
            "log": torch.log,
            "log10": torch.log10,
            "log1p": torch.log1p,
            "log2": torch.log2,
            "reciprocal": torch.reciprocal,
            "rsqrt": torch.rsqrt,
            "sigmoid": torch.sigmoid,
            "sin": torch.sin,
            "sinh": torch.sinh,
            "sqrt": torch.sqrt,
            "tan": torch.tan,
            "tanh": torch.tanh,
            "truediv": torch.true_divide,
            "atan2": torch.atan2,
        }.items()
    },
    **{
        name: _asking(name, function)
        for name, function in {
            "isfinite": torch.isfinite,
            "isinf": torch.isinf,
            "isnan": torch.isnan,
            "isneginf": torch.isneginf,
            "isposinf": torch.isposinf,
            "isreal": torch.isreal,
        }.items()
    },
    **{
        name: _arithmetic(function)
        for name, function in {
            "neg": torch.neg,
            "add": torch.add,
            "div": _divided,
            "fmod": torch.fmod,
            "mul": torch.mul,
            "pow": torch.pow,
            "remainder": torch.remainder,
            "sub": torch.sub,
            "minimum": torch.minimum,
            "maximum": torch.maximum,
        }.items()
    },
    **{
        name: _comparison(function)
        for name, function in {
            "eq": torch.eq,
            "ge": torch.ge,
            "gt": torch.gt,
            "le": torch.le,
            "lt": torch.lt,
            "ne": torch.ne,
        }.items()
    },
    **dict.fromkeys(("set", "segment_set"), _copied),
    "nextafter": lambda fusion, x, y: promoted_elementwise(
        fusion, torch.nextafter, [as_val(fusion, x), as_val(fusion, y)], full_precision=True
    ),
    "mod": _mod,
    "logical_and": _logical(torch.logical_and),
    "logical_or": _logical(torch.logical_or),
    "bitwise_and": _bitwise("bitwise_and", torch.bitwise_and, "logical_and"),
    "bitwise_or": _bitwise("bitwise_or", torch.bitwise_or, "logical_or"),
    "bitwise_xor": _bitwise("bitwise_xor", torch.bitwise_xor, "ne"),
    "bitwise_left_shift": _of_integers(torch.bitwise_left_shift),
    "bitwise_right_shift": _of_integers(torch.bitwise_right_shift),
    "gcd": _of_integers(torch.gcd),
    "logical_right_shift": _logical_right_shift,
    "logical_not": _logical_not,
    "bitwise_not": _bitwise_not,
    "abs": _abs,
    "real": _real,
    "imag": _imag,
    "complex": _complex,
    "signbit": _signbit,
    "sign": _sign,
    "where": _where,
    "lerp": _lerp,
    "clamp": _clamp,
    "threshold": _threshold,
    "addcmul": _addcmul,
    "cast": cast,
}
"""What each elementwise operation of the binding does, by its name: a function of the fusion and the arguments."""
