"""The operations of `nvfuser_direct`, with every overload that its binding has, as a table of facts.

Written after nvFuser 0.2.36, `python/python_direct/ops.cpp`. pybind11 chooses the first overload that the arguments
fit, knows no keyword for a parameter that the binding left unnamed, and answers a TypeError that lists what there is.
`bound` does the same. Where the binding has an overload for tensors beside one that takes any value, the table has the
one that takes any value: a TensorView is a Val, and the arguments and the result are the same.

Where pybind11 would convert silently (a DataType to an integer, anything to a bool), this table does not: a translator
has no reason to lean on it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.partition.compilers.nvfuser.data_types import DataType
from tests.partition.compilers.nvfuser.values import Scalar, TensorView

__all__ = ["ADD_OUTPUT", "DEFINE_SCALAR", "DEFINE_TENSOR", "OVERLOADS", "Bound", "Overload", "Parameter", "bound"]

_MISSING: Any = object()


@dataclass(frozen=True)
class Parameter:
    """One parameter: its name where the binding gave one, what it takes, and its default where there is one."""

    name: str | None
    takes: str
    default: Any = _MISSING
    keyword_only: bool = False

    def __str__(self) -> str:
        if self.name is None:
            return self.takes
        return f"{self.name}: {self.takes}" + ("" if self.default is _MISSING else f" = {self.default!r}")


@dataclass(frozen=True)
class Overload:
    """The parameters of one overload, in their order."""

    parameters: tuple[Parameter, ...]

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.parameters))})"


def _is_int(value: Any) -> bool:
    # pybind11 takes True for an integer too, and so does this: bool is an int in Python.
    return isinstance(value, int) and -(2**63) <= value < 2**63


def _is_number(value: Any) -> bool:
    return _is_int(value) or isinstance(value, (float, complex))


def _each(value: Any, kinds: tuple[type, ...], fits: Any) -> bool:
    return isinstance(value, kinds) and all(fits(one) for one in value)


_FITS: Mapping[str, Any] = {
    "TensorView": lambda value: isinstance(value, TensorView),
    "TensorView | None": lambda value: value is None or isinstance(value, TensorView),
    "Val": lambda value: isinstance(value, (TensorView, Scalar)),
    "Val | None": lambda value: value is None or isinstance(value, (TensorView, Scalar)),
    "Val | number": lambda value: isinstance(value, (TensorView, Scalar)) or _is_number(value),
    "Val | number | None": lambda value: value is None or isinstance(value, (TensorView, Scalar)) or _is_number(value),
    "number | None": lambda value: value is None or _is_number(value),
    "int": _is_int,
    "bool": lambda value: isinstance(value, bool),
    "DataType": lambda value: isinstance(value, DataType),
    "DataType | None": lambda value: value is None or isinstance(value, DataType),
    "Sequence[int]": lambda value: _each(value, (list, tuple), _is_int),
    "Sequence[bool]": lambda value: _each(value, (list, tuple), lambda one: isinstance(one, bool)),
    "Sequence[bool | None]": lambda value: _each(
        value, (list, tuple), lambda one: one is None or isinstance(one, bool)
    ),
    "Sequence[TensorView]": lambda value: _each(value, (list, tuple), lambda one: isinstance(one, TensorView)),
    # The binding takes any list here, and looks at what is in it later.
    "list": lambda value: isinstance(value, list),
    "tuple": lambda value: isinstance(value, tuple),
    "list | None": lambda value: value is None or isinstance(value, list),
    "tuple | None": lambda value: value is None or isinstance(value, tuple),
}


def _overload(*parameters: str | Parameter, **defaults: Any) -> Overload:
    """`"name: takes"` or, unnamed, `"takes"`, and the defaults by name."""
    made = []
    for parameter in parameters:
        if isinstance(parameter, Parameter):
            made.append(parameter)
            continue
        name, found, takes = parameter.partition(": ")
        made.append(Parameter(name, takes, defaults.pop(name, _MISSING)) if found else Parameter(None, name))
    assert not defaults, f"a default of no parameter: {defaults}"
    return Overload(tuple(made))


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_UNARY = (_overload("Val | number"),)
_BINARY = (_overload("Val | number", "Val | number"),)
_TERNARY = (_overload("Val | number", "Val | number", "Val | number"),)
_THRESHOLD = (_overload("Val | number", "Val | number | None", "Val | number | None"),)
_TERNARY_WITH_ALPHA = (_overload("Val | number", "Val | number", "Val | number", "Val | number"),)
_REDUCTION = (
    _overload("arg: TensorView", "dtype: DataType", dtype=DataType.Null),
    _overload("arg: TensorView", "dim: int", "keepdim: bool", "dtype: DataType", keepdim=False, dtype=DataType.Null),
    _overload(
        "arg: TensorView", "dims: Sequence[int]", "keepdim: bool", "dtype: DataType", keepdim=False, dtype=DataType.Null
    ),
)
_SCAN = (_overload("arg: TensorView", "dim: int", "init: Val | None", init=None),)
_VARIANCE = (
    _overload(
        "arg: TensorView", "dims: Sequence[int]", "correction: int", "keepdim: bool", correction=1, keepdim=False
    ),
)
_BY_INDEX = (_overload("arg: TensorView", "index: TensorView", "dim: int"),)


def _random(first: str, second: str) -> tuple[Overload, ...]:
    return tuple(
        _overload(
            f"{first}: Val | number",
            f"{second}: Val | number",
            f"shape: {sequence}",
            Parameter("rng_seed", "Val | None", None, keyword_only=True),
            Parameter("rng_offset", "Val | None", None, keyword_only=True),
            Parameter("dtype", "DataType", DataType.Float, keyword_only=True),
        )
        for sequence in ("list", "tuple")
    )


def _list_or_tuple(*parameters: str, **defaults: Any) -> tuple[Overload, ...]:
    """The two overloads of an operation whose sequences must be all lists or all tuples."""
    return tuple(
        _overload(*(parameter.replace("list", sequence) for parameter in parameters), **defaults)
        for sequence in ("list", "tuple")
    )


_OUTPUT_OF_MATMUL = {
    "alpha": None,
    "bias": None,
    "beta": None,
    "dtype": DataType.BFloat16,
    "output_block_scale_size": 0,
    "output_block_scale_dtype": DataType.BFloat16,
    "output_gamma": False,
}
_TAIL_OF_MATMUL = (
    "scale1: TensorView",
    "scale2: TensorView",
    "alpha: TensorView | None",
    "bias: TensorView | None",
    "beta: TensorView | None",
    "dtype: DataType",
    "output_block_scale_size: int",
    "output_block_scale_dtype: DataType",
    "output_gamma: bool",
)

OVERLOADS: Mapping[str, tuple[Overload, ...]] = {
    **dict.fromkeys(
        _names(
            "abs acos acosh asin asinh atan atanh ceil cos cosh exp exp2 expm1 erf erfc erfinv erfcinv floor frac "
            "lgamma log log10 log1p log2 neg logical_not bitwise_not relu rand_like randn_like reciprocal round rsqrt "
            "set segment_set sign sigmoid signbit silu sin sinh sqrt tan tanh trunc isfinite isinf isnan isneginf "
            "isposinf isreal real imag"
        ),
        _UNARY,
    ),
    **dict.fromkeys(
        _names(
            "add atan2 div truediv fmod mul nextafter pow remainder sub minimum maximum mod eq ge gt le lt ne "
            "logical_and logical_or bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift "
            "logical_right_shift gcd"
        ),
        _BINARY,
    ),
    "complex": (_overload("Val", "Val"),),
    **dict.fromkeys(_names("lerp where"), _TERNARY),
    **dict.fromkeys(_names("clamp threshold"), _THRESHOLD),
    "addcmul": _TERNARY_WITH_ALPHA,
    **dict.fromkeys(_names("max min prod sum"), _REDUCTION),
    **dict.fromkeys(_names("var var_mean"), _VARIANCE),
    "welford": (_overload("arg: TensorView", "dims: Sequence[int]"),),
    **dict.fromkeys(_names("cumsum cumprod cummin cummax"), _SCAN),
    "cast": (_overload("arg: Val | number", "dtype: DataType"),),
    "triu": (_overload("arg: TensorView", "diagonal: int", diagonal=0),),
    "matmul": (_overload("arg1: TensorView", "arg2: TensorView"),),
    "linear": (_overload("arg1: TensorView", "arg2: TensorView", "bias: TensorView | None", bias=None),),
    "grouped_mm": (
        _overload("mat1: TensorView", "mat2: TensorView", "offsets: TensorView"),
        _overload("mat1: TensorView", "mat2: TensorView", "offsets: TensorView", *_TAIL_OF_MATMUL, **_OUTPUT_OF_MATMUL),
    ),
    "cutlass_nvfp4_grouped_mm": (
        _overload(
            *(
                f"{name}: TensorView"
                for name in _names("mat1 mat2 scale1 scale2 alpha problem_sizes expert_offsets sf_offsets")
            ),
            "dtype: DataType",
            dtype=DataType.BFloat16,
        ),
    ),
    "scaled_mm": (_overload("mat1: TensorView", "mat2: TensorView", *_TAIL_OF_MATMUL, **_OUTPUT_OF_MATMUL),),
    "broadcast": (_overload("arg: TensorView", "is_broadcast_dim: Sequence[bool]"),),
    "broadcast_in_dim": _list_or_tuple("arg: TensorView", "shape: list", "broadcast_dims: Sequence[int]"),
    "reshape": _list_or_tuple("arg: TensorView", "new_shape: list"),
    "permute": (_overload("arg: TensorView", "dims: Sequence[int]"),),
    "expand": _list_or_tuple("arg: TensorView", "shape: list"),
    "squeeze": (_overload("arg: TensorView", "dims: Sequence[int]", "squeeze_expanded: bool", squeeze_expanded=False),),
    "slice": _list_or_tuple(
        "arg: TensorView",
        "start_indices: list",
        "end_indices: list",
        "strides: list | None",
        "manual_normalization: bool",
        strides=None,
        manual_normalization=False,
    ),
    "size": (_overload("arg: TensorView", "dim: int"),),
    "shape": (_overload("TensorView"),),
    "stride_order": (_overload("arg: TensorView", "stride_order: Sequence[int]"),),
    **dict.fromkeys(_names("index_select gather take_along_axis"), _BY_INDEX),
    "select": (_overload("arg: TensorView", "index: Val", "dim: int"),),
    "scatter": (_overload("arg: TensorView", "index: TensorView", "src: Val", "dim: int"),),
    "pad": _list_or_tuple("arg: TensorView", "pad_widths: list", "value: Val | number | None", value=None),
    "cat": (
        _overload("tensors: Sequence[TensorView]", "dim: int", "manual_padding: bool", dim=0, manual_padding=False),
    ),
    "embedding_fwd": (
        _overload(
            "input: TensorView",
            "weight: TensorView",
            *(f"{name}: Val | None" for name in _names("padding_idx max_norm norm_type scale_grad_by_freq sparse")),
            **dict.fromkeys(_names("padding_idx max_norm norm_type scale_grad_by_freq sparse")),
        ),
    ),
    "preprocess_grouped_matmul_input_sf": (
        _overload("input: TensorView", "input_offsets: TensorView", "output_offsets: TensorView"),
    ),
    "iota": (
        _overload(
            "length: Val | number",
            "start: Val | number | None",
            "step: Val | number | None",
            "dtype: DataType",
            start=None,
            step=None,
            dtype=DataType.Int,
        ),
    ),
    "full": _list_or_tuple("shape: list", "fill_value: Val | number", "dtype: DataType"),
    "topk": (
        _overload(
            "arg: TensorView",
            "k: Val",
            "dim: int",
            "largest: bool",
            "sorted: bool",
            dim=-1,
            largest=True,
            sorted=False,
        ),
    ),
    "argsort": (
        _overload("arg: TensorView", "dim: int", "descending: bool", "stable: bool", descending=False, stable=False),
    ),
    "sdpfa_fwd": (
        _overload(
            "query: TensorView",
            "key: TensorView",
            "value: TensorView",
            "bias: TensorView | None",
            "mask: TensorView | None",
            "dropout_p: Val | number | None",
            "is_causal: Val | number | None",
            "scale: Val | number | None",
            **dict.fromkeys(_names("bias mask dropout_p is_causal scale")),
        ),
    ),
    "sdpfa_bwd": (
        _overload(
            *(f"{name}: TensorView" for name in _names("grad_output query key value output logsumexp")),
            "dropout_p: Val | number | None",
            "is_causal: Val | number | None",
            "philox_seed: TensorView",
            "philox_offset: TensorView",
            "scale: Val | number | None",
        ),
    ),
    "normal": _random("mean", "std"),
    "uniform": _random("minval", "maxval"),
    "nv_block_quantize": (
        _overload(
            "input: TensorView",
            "global_scale: TensorView | None",
            "swizzle_block_scales: bool",
            "block_size: int",
            "dtype: DataType",
            global_scale=None,
            swizzle_block_scales=False,
            block_size=16,
            dtype=DataType.Float4_e2m1fn,
        ),
    ),
    "nv_grouped_block_quantize": (
        _overload(
            "input: TensorView",
            "input_offsets: TensorView",
            "output_offsets: TensorView",
            "global_scale: TensorView | None",
            "block_size: int",
            "dtype: DataType",
            global_scale=None,
            block_size=16,
            dtype=DataType.Float4_e2m1fn,
        ),
    ),
}
"""Every operation of `nvfuser_direct.ops`, and its overloads in the order in which they are tried."""

DEFINE_TENSOR = (
    _overload(
        "shape: Sequence[int]",
        "contiguity: Sequence[bool | None]",
        "dtype: DataType",
        "is_cpu: bool",
        "stride_order: Sequence[int]",
        dtype=DataType.Float,
        is_cpu=False,
        stride_order=[],
    ),
    _overload(
        "shape: Sequence[int]",
        "contiguity: bool",
        "dtype: DataType",
        "is_cpu: bool",
        "stride_order: Sequence[int]",
        contiguity=False,
        dtype=DataType.Float,
        is_cpu=False,
        stride_order=[],
    ),
    _overload(
        "sizes: Sequence[int]",
        "strides: Sequence[int]",
        "dtype: DataType",
        "static_sizes: bool",
        "is_cpu: bool",
        dtype=DataType.Float,
        static_sizes=False,
        is_cpu=False,
    ),
)
DEFINE_SCALAR = (
    _overload("dtype: DataType", dtype=DataType.Double),
    _overload("value: number | None", "dtype: DataType | None", dtype=None),
)
ADD_OUTPUT = (
    _overload("output: Val"),
    _overload("output: Val", "alias_input: Val"),
)


@dataclass(frozen=True)
class Bound:
    """A call that one overload fits: its values in the order of the parameters."""

    overload: Overload
    values: tuple[Any, ...]

    def named(self) -> dict[str, Any]:
        """The values of the parameters that have a name, by it."""
        pairs = zip(self.overload.parameters, self.values, strict=True)
        return {parameter.name: value for parameter, value in pairs if parameter.name is not None}

    def written(self, write: Callable[[Any], str]) -> str:
        """The call's arguments as Python: unnamed ones by position, named ones by name, defaults left out."""
        parts = []
        for parameter, value in zip(self.overload.parameters, self.values, strict=True):
            if parameter.name is None:
                parts.append(write(value))
            elif parameter.default is _MISSING or (type(value), value) != (type(parameter.default), parameter.default):
                parts.append(f"{parameter.name}={write(value)}")
        return ", ".join(parts)


def _fit(overload: Overload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Bound | None:
    by_position = [parameter for parameter in overload.parameters if not parameter.keyword_only]
    if len(args) > len(by_position):
        return None
    given = dict(zip(map(id, by_position), args, strict=False))
    unused = dict(kwargs)
    values = []
    for parameter in overload.parameters:
        if id(parameter) in given:
            value = given[id(parameter)]
        elif parameter.name in unused:
            value = unused.pop(parameter.name)
        elif parameter.default is not _MISSING:
            values.append(parameter.default)
            continue
        else:
            return None
        if not _FITS[parameter.takes](value):
            return None
        values.append(value)
    return None if unused else Bound(overload, tuple(values))


def bound(name: str, overloads: tuple[Overload, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Bound:
    """The first overload that a call fits, and what it gives to each parameter.

    Raises:
        TypeError: no overload fits; as pybind11 says it, with all there are.
    """
    for overload in overloads:
        found = _fit(overload, args, kwargs)
        if found is not None:
            return found
    supported = "\n".join(f"    {number}. {name}{overload}" for number, overload in enumerate(overloads, 1))
    invoked = ", ".join([*map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())])
    raise TypeError(
        f"{name}(): incompatible function arguments. The following argument types are supported:\n{supported}\n\n"
        f"Invoked with: {invoked}"
    )
