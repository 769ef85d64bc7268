"""A stand-in for `nvfuser_direct` that runs definitions with torch on the CPU.

nvFuser needs a GPU and a separate wheel. This module takes the same calls for the operations that the backend emits,
and raises RuntimeError for the mistakes that a translation can make:

- Operands of different dtypes or ranks, numbers of another kind than the tensor, and computing in half precision.
  nvFuser would promote and broadcast these, by rules that are not torch's.
- Broadcasting, expanding or squeezing a size that was not 1 when the definition was made.
- An input of another layout, dtype or device than was defined, and an output that is an input or another output.

It cannot test nvFuser's kernels. `make test-nvfuser` builds the same definitions with the real package.
"""

from __future__ import annotations

import enum
import operator
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["FusionDefinition", "StandIn"]

T = TypeVar("T")

VERSION = "0.2.36"
MAX_RANK = 8


class DataType(enum.Enum):
    """nvFuser's names of dtypes."""

    Double = torch.float64
    Float = torch.float32
    Half = torch.float16
    BFloat16 = torch.bfloat16
    Int = torch.int64
    Int32 = torch.int32
    Bool = torch.bool

    def __repr__(self) -> str:
        return f"DataType.{self.name}"


_KINDS: Mapping[DataType, type] = {
    DataType.Double: float,
    DataType.Float: float,
    DataType.Int: int,
    DataType.Int32: int,
    DataType.Bool: bool,
}
"""The dtypes that a definition computes in, and the kind of numbers that they hold."""

Axes = tuple[bool | None, ...]
"""For each dimension whether its size is 1: True, False, or None for one that only a call knows."""


def check(condition: object, message: str) -> None:
    """Raise RuntimeError, as nvFuser does."""
    if not condition:
        raise RuntimeError(message)


class Value:
    """A tensor of a definition, or a scalar, whose `axes` are None."""

    def __init__(self, definition: FusionDefinition, name: str, dtype: DataType, axes: Axes | None) -> None:
        self.definition = definition
        self.name = name
        self.dtype = dtype
        self.axes = axes

    def __repr__(self) -> str:
        return self.name


def _axes(value: Any) -> Axes:
    check(isinstance(value, Value) and value.axes is not None, f"wanted a tensor, got {value!r}")
    axes: Axes = value.axes
    return axes


def _is_size(value: Any) -> bool:
    return type(value) is int or (isinstance(value, Value) and value.axes is None and value.dtype is DataType.Int)


def _check_fits(value: Any, dtype: DataType) -> None:
    """Check an operand beside a tensor of a dtype: the same dtype, a number of its kind, or a size."""
    if not isinstance(value, Value):
        check(type(value) is _KINDS[dtype] and dtype is not DataType.Bool, f"{value!r} is not a number of {dtype}")
    elif value.dtype is not dtype:
        check(_is_size(value) and dtype is not DataType.Bool, f"{value} is {value.dtype}, beside {dtype}")


def _joined(operands: Sequence[Value]) -> Axes:
    """The axes of an elementwise operation's result."""
    ranks = {len(_axes(one)) for one in operands}
    check(len(ranks) == 1, f"operands have different numbers of dimensions: {sorted(ranks)}")
    return tuple(
        False if False in met else None if None in met else True
        for met in zip(*(_axes(one) for one in operands), strict=True)
    )


def _same_sizes(operands: Sequence[Value], tensors: Sequence[Tensor], *, but: int | None = None) -> None:
    for dim, sizes in enumerate(zip(*(one.shape for one in tensors), strict=True)):
        for one, size in zip(operands, sizes, strict=True):
            stretches = size == 1 and _axes(one)[dim] is not False
            check(
                dim == but or size == max(sizes) or stretches,
                f"dimension {dim} of {one} has size {size}, beside {max(sizes)}: a size that was not 1 when the "
                "definition was made is not broadcast",
            )


def _elementwise(function: Callable[..., Tensor], takes: Sequence[type], *, gives: DataType | None = None) -> Any:
    def emit(fd: FusionDefinition, *operands: Any) -> Value:
        tensors = [one for one in operands if isinstance(one, Value) and one.axes is not None]
        if not tensors:
            check(
                all(map(_is_size, operands)) and function in _ON_SIZES,
                f"{function} is not supported for scalars: {operands}",
            )
            return fd.add(DataType.Int, None, _ON_SIZES[function], operands)
        dtype = tensors[0].dtype
        check(_KINDS.get(dtype) in takes, f"{function.__name__} computes {list(takes)}, got {dtype}")
        for one in operands:
            _check_fits(one, dtype)

        def compute(*values: Any) -> Tensor:
            given = [one if isinstance(one, Tensor) else torch.tensor(one, dtype=dtype.value) for one in values]
            places = [place for place, one in enumerate(operands) if one in tensors]
            _same_sizes(tensors, [given[place] for place in places])
            return function(*given)

        return fd.add(gives or dtype, _joined(tensors), compute, operands)

    return emit


_ON_SIZES: Mapping[Any, Callable[..., Any]] = {torch.mul: operator.mul, torch.sub: operator.sub}


def _where(fd: FusionDefinition, condition: Value, x: Any, y: Any) -> Value:
    tensors = [one for one in (x, y) if isinstance(one, Value) and one.axes is not None]
    check(tensors, "where needs a tensor beside the condition")
    check(condition.dtype is DataType.Bool, f"a condition is Bool, got {condition.dtype}")
    dtype = tensors[0].dtype
    for one in (x, y):
        _check_fits(one, dtype)

    def compute(chosen: Tensor, *values: Any) -> Tensor:
        given = [one if isinstance(one, Tensor) else torch.tensor(one, dtype=dtype.value) for one in values]
        _same_sizes([condition, *tensors], [chosen, *(one for one in values if isinstance(one, Tensor))])
        return torch.where(chosen, *given)

    return fd.add(dtype, _joined([condition, *tensors]), compute, (condition, x, y))


def _cast(fd: FusionDefinition, arg: Value, dtype: DataType) -> Value:
    return fd.add(dtype, _axes(arg), lambda x: x.to(dtype.value), (arg,), computes=False)


def _set(fd: FusionDefinition, arg: Value) -> Value:
    return fd.add(arg.dtype, _axes(arg), Tensor.clone, (arg,), computes=False)


def _dims_of(arg: Value, dims: Sequence[int]) -> Sequence[int]:
    fits = dims and len({*dims}) == len(dims) and all(type(dim) is int and 0 <= dim < len(_axes(arg)) for dim in dims)
    check(fits, f"not dimensions of a tensor with {len(_axes(arg))}: {dims}")
    return dims


def _without(arg: Value, dims: Sequence[int], keepdim: bool) -> Axes:
    check(type(keepdim) is bool, f"keepdim is a bool, got {keepdim!r}")
    axes = _axes(arg)
    return tuple(True if dim in dims else axis for dim, axis in enumerate(axes) if keepdim or dim not in dims)


def _sum(fd: FusionDefinition, arg: Value, dims: Any, keepdim: bool = False, dtype: DataType | None = None) -> Value:
    # nvFuser sums integers in int64, unless a dtype is given.
    found = dtype or (arg.dtype if _KINDS[arg.dtype] is float else DataType.Int)
    axes = _without(arg, _dims_of(arg, dims), keepdim)
    return fd.add(found, axes, lambda x: x.sum(dims, keepdim, dtype=found.value), (arg,))


def _extreme(function: Callable[..., Tensor]) -> Any:
    def emit(fd: FusionDefinition, arg: Value, dims: Any, keepdim: bool = False) -> Value:
        check(arg.dtype is not DataType.Bool, "max and min take no booleans")
        axes = _without(arg, _dims_of(arg, dims), keepdim)
        return fd.add(arg.dtype, axes, lambda x: function(x, dims, keepdim), (arg,))

    return emit


def _var_mean(fd: FusionDefinition, arg: Value, dims: Any, correction: int, keepdim: bool = False) -> tuple[Value, ...]:
    check(_KINDS[arg.dtype] is float and correction >= 0, f"no variance of {arg.dtype} with correction {correction}")
    axes = _without(arg, _dims_of(arg, dims), keepdim)
    options: Any = {"dim": dims, "correction": correction, "keepdim": keepdim}
    return (
        fd.add(arg.dtype, axes, lambda x: torch.var(x, **options), (arg,)),
        fd.add(arg.dtype, axes, lambda x: x.mean(dims, keepdim), (arg,)),
    )


def _broadcast(fd: FusionDefinition, arg: Value, is_broadcast_dim: Sequence[bool]) -> Value:
    check(
        is_broadcast_dim.count(False) == len(_axes(arg)),
        f"{is_broadcast_dim} must be False for each dimension of {arg}",
    )
    old = iter(_axes(arg))
    axes = tuple(True if new else next(old) for new in is_broadcast_dim)
    view = tuple(None if new else slice(None) for new in is_broadcast_dim)
    return fd.add(arg.dtype, axes, lambda x: x[view], (arg,))


def _squeeze(fd: FusionDefinition, arg: Value, dims: Sequence[int]) -> Value:
    axes = _axes(arg)
    check(all(axes[dim] is not False for dim in _dims_of(arg, dims)), f"squeezes a size that may not be 1: {dims}")

    def compute(x: Tensor) -> Tensor:
        check(all(x.shape[dim] == 1 for dim in dims), f"dimensions {dims} of {list(x.shape)} are not all 1")
        return x.squeeze(tuple(dims))

    return fd.add(arg.dtype, tuple(axis for dim, axis in enumerate(axes) if dim not in dims), compute, (arg,))


def _expand(fd: FusionDefinition, arg: Value, shape: Sequence[Any]) -> Value:
    axes = _axes(arg)
    check(len(shape) == len(axes), f"expand of {len(axes)} dimensions to {len(shape)}")
    stays = [type(size) is int and size == -1 for size in shape]
    for axis, size, same in zip(axes, shape, stays, strict=True):
        check(same or (axis is not False and _is_size(size)), f"expands a size that may not be 1 to {size}")
    grown = tuple(
        axis if same or (type(size) is int and size == 1) else False
        for axis, size, same in zip(axes, shape, stays, strict=True)
    )
    return fd.add(arg.dtype, grown, lambda x, sizes: x.expand(sizes), (arg, shape))


def _new_axes(sizes: Sequence[Any]) -> Axes:
    check(isinstance(sizes, list) and all(map(_is_size, sizes)), f"not a list of sizes: {sizes}")
    return tuple(None if isinstance(size, Value) or size == -1 else size == 1 for size in sizes)


def _reshape(fd: FusionDefinition, arg: Value, new_shape: Sequence[Any]) -> Value:
    _axes(arg)
    return fd.add(arg.dtype, _new_axes(new_shape), lambda x, sizes: x.reshape(sizes), (arg, new_shape))


def _permute(fd: FusionDefinition, arg: Value, dims: Sequence[int]) -> Value:
    axes = _axes(arg)
    check(sorted(dims) == list(range(len(axes))), f"not an order of {len(axes)} dimensions: {dims}")
    return fd.add(arg.dtype, tuple(axes[dim] for dim in dims), lambda x: x.permute(tuple(dims)), (arg,))


def _cat(fd: FusionDefinition, tensors: Sequence[Value], dim: int) -> Value:
    dtypes = {one.dtype for one in tensors}
    check(len(dtypes) == 1 and 0 <= dim < len(_axes(tensors[0])), f"cat of {dtypes} along {dim}")

    def compute(values: Sequence[Tensor]) -> Tensor:
        _same_sizes(tensors, values, but=dim)
        return torch.cat([*values], dim)

    axes = _joined(tensors)
    return fd.add(tensors[0].dtype, (*axes[:dim], None, *axes[dim + 1 :]), compute, (tensors,))


def _full(fd: FusionDefinition, shape: Sequence[Any], fill_value: Any, dtype: DataType) -> Value:
    _check_fits(fill_value, dtype)
    return fd.add(
        dtype, _new_axes(shape), lambda sizes, fill: torch.full(sizes, fill, dtype=dtype.value), (shape, fill_value)
    )


def _size(fd: FusionDefinition, arg: Value, dim: int) -> Value:
    check(0 <= dim < len(_axes(arg)), f"{arg} has no dimension {dim}")
    return fd.add(DataType.Int, None, lambda x: x.shape[dim], (arg,))


def _all(names: str, takes: Sequence[type], *, gives: DataType | None = None) -> dict[str, Any]:
    return {name: _elementwise(getattr(torch, name), takes, gives=gives) for name in names.split()}


OPERATIONS: Mapping[str, Any] = {
    **_all("cos erf exp exp2 log log1p pow reciprocal relu rsqrt sigmoid sin sqrt tan tanh", [float]),
    "silu": _elementwise(F.silu, [float]),
    "truediv": _elementwise(torch.true_divide, [float]),
    **_all("abs add maximum minimum mul neg sub", [float, int]),
    **_all("eq ge gt le lt ne", [float, int, bool], gives=DataType.Bool),
    **_all("logical_and logical_not logical_or", [bool]),
    **_all("bitwise_and bitwise_not bitwise_or", [int, bool]),
    "broadcast": _broadcast,
    "cast": _cast,
    "cat": _cat,
    "expand": _expand,
    "full": _full,
    "max": _extreme(torch.amax),
    "permute": _permute,
    "reshape": _reshape,
    "set": _set,
    "size": _size,
    "squeeze": _squeeze,
    "sum": _sum,
    "var_mean": _var_mean,
    "where": _where,
}
"""What each operation adds to a definition, by nvFuser's name."""


def _map(value: Any, function: Callable[[Value], Any]) -> Any:
    """A call's argument with each `Value` in it replaced."""
    if isinstance(value, Value):
        return function(value)
    return type(value)(_map(one, function) for one in value) if isinstance(value, list | tuple) else value


def _text(value: Any) -> str:
    """An argument as Python that needs no import but `DataType`."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    finite = not isinstance(value, float) or -torch.inf < value < torch.inf
    return repr(value) if finite else f'float("{value}")'


class _Ops:
    """`FusionDefinition.ops`: each operation of the table as a method that also records the call."""

    def __init__(self, definition: FusionDefinition) -> None:
        self._definition = definition

    def __getattr__(self, name: str) -> Any:
        if name not in OPERATIONS:
            raise AttributeError(f"the stand-in has no operation '{name}'")

        def call(*args: Any, **kwargs: Any) -> Any:
            made = OPERATIONS[name](self._definition, *args, **kwargs)
            return self._definition.record(f"fd.ops.{name}", made, *args, **kwargs)

        return call


class FusionDefinition:
    """`nvfuser_direct.FusionDefinition`. For the tests it has its calls, `script()`, and counts its `executions`."""

    stand_in: StandIn

    def __init__(self) -> None:
        self.ops = _Ops(self)
        self.executions = 0
        self.inputs: list[Value] = []
        self._checks: list[Callable[[Any], None]] = []
        self._outputs: list[Value] = []
        self._steps: list[tuple[Value, Callable[..., Any], tuple[Any, ...]]] = []
        self._lines: list[str] = []
        self._num_values = 0

    def __enter__(self) -> FusionDefinition:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if error_type is None:
            self.stand_in.defined.append(self)

    def record(self, function: str, made: T, *args: Any, **kwargs: Any) -> T:
        """Write down a call, and return what it made."""
        given = [*map(_text, args), *(f"{name}={_text(one)}" for name, one in kwargs.items())]
        targets = ", ".join(map(str, made)) if isinstance(made, tuple) else made
        self._lines.append(f"{f'{targets} = ' if made is not None else ''}{function}({', '.join(given)})")
        return made

    def script(self) -> str:
        """Python that makes this definition again, of an `fd` and `DataType`."""
        return "\n".join(self._lines)

    def add(
        self,
        dtype: DataType,
        axes: Axes | None,
        compute: Callable[..., Any],
        arguments: tuple[Any, ...],
        *,
        computes: bool = True,
    ) -> Value:
        """Add a value that `compute` makes of the arguments' values.

        Half precision passes through operations that do not compute, at the edges of a definition, and no others.
        """

        def checked(value: Value) -> None:
            check(value.definition is self, f"{value} is a value of another definition")
            check(not computes or value.dtype in _KINDS, f"{value} is {value.dtype}: cast it to Float first")

        _map(arguments, checked)
        check(not computes or dtype in _KINDS, f"computes {dtype}")
        made = self._value(dtype, axes)
        self._steps.append((made, compute, arguments))
        return made

    def _value(self, dtype: DataType, axes: Axes | None) -> Value:
        check(axes is None or len(axes) <= MAX_RANK, f"a tensor has at most {MAX_RANK} dimensions")
        made = Value(self, f"{'s' if axes is None else 't'}{self._num_values}", dtype, axes)
        self._num_values += 1
        return made

    def define_scalar(self, value: Any = None, dtype: DataType = DataType.Int) -> Value:
        """A constant, or without a value an input."""
        made = self._value(dtype, None)
        if value is None:

            def check_number(given: Any) -> None:
                check(type(given) is _KINDS[dtype], f"wanted a number of {dtype}, got {given!r}")

            self.inputs.append(made)
            self._checks.append(check_number)
        else:
            check(type(value) is _KINDS[dtype], f"{value!r} is not a number of {dtype}")
            self._steps.append((made, lambda: value, ()))
        return self.record("fd.define_scalar", made, value, dtype)

    def define_tensor(
        self,
        *,
        shape: Sequence[int],
        contiguity: Sequence[bool | None],
        dtype: DataType,
        is_cpu: bool,
        stride_order: Sequence[int],
    ) -> Value:
        """An input; `shape` has 1 or -1, `contiguity` is outermost first, `stride_order` counts from the innermost."""
        rank = len(shape)
        check(sorted(stride_order) == list(range(rank)), f"not an order of {rank} dimensions: {stride_order}")
        check(len(contiguity) == rank, f"contiguity of {rank} dimensions: {contiguity}")
        check(not (is_cpu and rank), "only a tensor without dimensions may be on the CPU")
        outer_first = sorted(range(rank), key=lambda dim: -stride_order[dim])
        dense = dict(zip(outer_first, contiguity, strict=True))
        check(all(size == -1 or dense[dim] is None for dim, size in enumerate(shape)), "a size of 1 is not contiguous")
        made = self._value(dtype, tuple(size == 1 for size in shape))

        def check_tensor(given: Any) -> None:
            found = (given.dtype, given.dim(), self.stand_in.is_on_cpu(given))
            check(found == (dtype.value, rank, is_cpu), f"{made} was defined as {dtype}, {rank}, {is_cpu}: got {found}")
            stride = 1
            for dim in reversed(outer_first):
                size, own = given.shape[dim], given.stride(dim)
                check(shape[dim] == -1 or size == 1, f"dimension {dim} of {made} was defined as 1, got {size}")
                check(shape[dim] == 1 or dense[dim] is not None or own == 0, f"{made} was defined as expanded")
                check(not dense[dim] or size == 1 or own == stride, f"{made} was defined as contiguous in {dim}")
                if dense[dim] is not None and size != 1:
                    stride = own * size

        self.inputs.append(made)
        self._checks.append(check_tensor)
        arguments = {"shape": shape, "contiguity": contiguity, "dtype": dtype, "is_cpu": is_cpu}
        return self.record("fd.define_tensor", made, **arguments, stride_order=stride_order)

    def add_output(self, output: Value) -> None:
        """An output, which is neither an input nor another output."""
        _axes(output)
        check(output not in (*self.inputs, *self._outputs), f"{output} is an input or an output already")
        self._outputs.append(output)
        self.record("fd.add_output", None, output)

    def execute(self, inputs: Sequence[Any], *, device: torch.device | None = None) -> list[Tensor]:
        """Compute the outputs."""
        check(len(inputs) == len(self.inputs), f"wanted {len(self.inputs)} inputs, got {len(inputs)}")
        for fits, given in zip(self._checks, inputs, strict=True):
            fits(given)
        values = dict(zip(self.inputs, inputs, strict=True))
        with torch.no_grad():
            for made, compute, arguments in self._steps:
                result = compute(*_map(arguments, values.__getitem__))
                if made.axes is not None:
                    assert (result.dtype, result.dim()) == (made.dtype.value, len(made.axes)), made
                values[made] = result
        self.executions += 1
        return [values[one] for one in self._outputs]


class StandIn(types.ModuleType):
    """A module to put where `nvfuser_direct` is imported from; CPU tensors count as on the GPU.

    Attributes:
        defined: the finished definitions.
    """

    def __init__(self) -> None:
        super().__init__("nvfuser_direct")
        self.defined: list[FusionDefinition] = []
        self.DataType = DataType
        self.FusionDefinition = type("FusionDefinition", (FusionDefinition,), {"stand_in": self})

    def version(self) -> str:
        return VERSION

    @property
    def executions(self) -> int:
        """How often definitions were executed."""
        return sum(one.executions for one in self.defined)

    def is_on_cpu(self, tensor: Tensor) -> bool:
        """Whether a tensor counts as on the CPU."""
        return tensor.is_cpu and tensor.dim() == 0
