"""A stand-in for `nvfuser_direct` that runs definitions with torch on the CPU.

nvFuser needs a GPU and a separate wheel. This module accepts the same calls for the operations that the backend emits,
and raises RuntimeError for the mistakes that a translation can make:

- Operands of different dtypes or ranks, numbers of another kind than the tensor, and computing in half precision.
  nvFuser would promote and broadcast these, by rules that are not torch's.
- Broadcasting, expanding or squeezing a size that was not 1 when the definition was made.
- An input whose layout, dtype or device differs from its definition, and an output that is an input or another output.

It cannot test nvFuser's kernels. `make test-nvfuser` builds the same definitions with the real package.
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["FusionDefinition", "StandIn"]


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


KINDS: Mapping[DataType, type] = {
    DataType.Double: float,
    DataType.Float: float,
    DataType.Int: int,
    DataType.Int32: int,
    DataType.Bool: bool,
}
"""The dtypes that a definition computes in, and the kind of numbers that they hold."""

Axes = tuple[bool | None, ...]
"""For each dimension whether its size is 1: True, False, or None if it varies between calls."""


def check(condition: object, message: str) -> None:
    """Raise RuntimeError, as nvFuser does."""
    if not condition:
        raise RuntimeError(message)


class Value:
    """A tensor of a definition, or a constant, whose `axes` are None."""

    def __init__(self, name: str, dtype: DataType, axes: Axes | None) -> None:
        self.name, self.dtype, self.axes = name, dtype, axes

    def __repr__(self) -> str:
        return self.name


def _axes(value: Any) -> Axes:
    check(isinstance(value, Value) and value.axes is not None, f"wanted a tensor, got {value!r}")
    axes: Axes = value.axes
    return axes


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Value) and value.axes is not None


def _joined(operands: Sequence[Value]) -> Axes:
    """The axes of an elementwise operation's result."""
    ranks = {len(_axes(operand)) for operand in operands}
    check(len(ranks) == 1, f"operands have different numbers of dimensions: {sorted(ranks)}")
    return tuple(
        False if False in met else None if None in met else True
        for met in zip(*(_axes(operand) for operand in operands), strict=True)
    )


def _same_sizes(operands: Sequence[Value], tensors: Sequence[Tensor], *, but: int | None = None) -> None:
    for dim, sizes in enumerate(zip(*(tensor.shape for tensor in tensors), strict=True)):
        for operand, size in zip(operands, sizes, strict=True):
            stretches = size == 1 and _axes(operand)[dim] is not False
            check(dim == but or size == max(sizes) or stretches, f"{operand} was not defined as 1 in dimension {dim}")


def _elementwise(function: Callable[..., Tensor], takes: Sequence[type], *, gives: DataType | None = None) -> Any:
    """An operation on tensors of one dtype and numbers of its kind; the condition of `where` is a boolean tensor."""

    def emit(fd: FusionDefinition, *operands: Any) -> Value:
        rest = operands[1:] if function is torch.where else operands
        tensors = [operand for operand in rest if _is_tensor(operand)]
        check(tensors, f"{function.__name__} needs a tensor, got {operands}")
        dtype = tensors[0].dtype
        check(KINDS.get(dtype) in takes, f"{function.__name__} computes {list(takes)}, got {dtype}")
        for operand in rest:
            fits = operand.dtype is dtype if isinstance(operand, Value) else type(operand) is KINDS[dtype] is not bool
            check(fits, f"{operand!r} beside {dtype}")
        check(rest is operands or operands[0].dtype is DataType.Bool, f"a condition is Bool, got {operands[0]}")
        read = [operand for operand in operands if _is_tensor(operand)]

        def compute(*values: Any) -> Tensor:
            args = [value if isinstance(value, Tensor) else torch.tensor(value, dtype=dtype.value) for value in values]
            _same_sizes(read, [value for value, operand in zip(args, operands, strict=True) if operand in read])
            return function(*args)

        return fd.add(gives or dtype, _joined(read), compute, operands)

    return emit


def _cast(fd: FusionDefinition, arg: Value, dtype: DataType | None = None) -> Value:
    """A copy, in another dtype if one is given."""
    dtype = dtype or arg.dtype
    return fd.add(dtype, _axes(arg), lambda x: x.to(dtype.value, copy=True), (arg,), computes=False)


def _without(arg: Value, dims: Sequence[int], keepdim: bool) -> Axes:
    axes = _axes(arg)
    check(dims and len({*dims}) == len(dims) and all(0 <= dim < len(axes) for dim in dims), f"dimensions {dims}")
    check(KINDS[arg.dtype] is float and type(keepdim) is bool, f"reduces {arg.dtype}, keepdim {keepdim!r}")
    return tuple(True if dim in dims else axis for dim, axis in enumerate(axes) if keepdim or dim not in dims)


def _reduction(function: Callable[..., Tensor]) -> Any:
    def emit(fd: FusionDefinition, arg: Value, dims: Any, keepdim: bool = False) -> Value:
        return fd.add(arg.dtype, _without(arg, dims, keepdim), lambda x: function(x, dims, keepdim), (arg,))

    return emit


def _var_mean(fd: FusionDefinition, arg: Value, dims: Any, correction: int, keepdim: bool = False) -> tuple[Value, ...]:
    axes = _without(arg, dims, keepdim)
    options: Any = {"dim": dims, "correction": correction, "keepdim": keepdim}
    return (
        fd.add(arg.dtype, axes, lambda x: torch.var(x, **options), (arg,)),
        fd.add(arg.dtype, axes, lambda x: x.mean(dims, keepdim), (arg,)),
    )


def _broadcast(fd: FusionDefinition, arg: Value, is_broadcast_dim: Sequence[bool]) -> Value:
    check(is_broadcast_dim.count(False) == len(_axes(arg)), f"{is_broadcast_dim} for {arg}")
    old = iter(_axes(arg))
    axes = tuple(True if new else next(old) for new in is_broadcast_dim)
    view = tuple(None if new else slice(None) for new in is_broadcast_dim)
    return fd.add(arg.dtype, axes, lambda x: x[view], (arg,))


def _squeeze(fd: FusionDefinition, arg: Value, dims: Sequence[int]) -> Value:
    axes = _axes(arg)
    check(all(axes[dim] is not False for dim in dims), f"squeezes a size that may not be 1: {dims}")

    def compute(x: Tensor) -> Tensor:
        check(all(x.shape[dim] == 1 for dim in dims), f"dimensions {dims} of {list(x.shape)} are not all 1")
        return x.squeeze(tuple(dims))

    return fd.add(arg.dtype, tuple(axis for dim, axis in enumerate(axes) if dim not in dims), compute, (arg,))


def _expand(fd: FusionDefinition, arg: Value, shape: Sequence[int]) -> Value:
    axes = _axes(arg)
    check(len(shape) == len(axes), f"expand of {len(axes)} dimensions to {len(shape)}")
    for axis, size in zip(axes, shape, strict=True):
        check(size == -1 or axis is not False, f"expands a size that may not be 1 to {size}")
    grown = tuple(axis if size in (-1, 1) else False for axis, size in zip(axes, shape, strict=True))
    return fd.add(arg.dtype, grown, lambda x: x.expand(shape), (arg,))


def _sizes(shape: Sequence[int]) -> Axes:
    check(isinstance(shape, list) and all(type(size) is int for size in shape), f"not a list of sizes: {shape}")
    return tuple(None if size == -1 else size == 1 for size in shape)


def _reshape(fd: FusionDefinition, arg: Value, new_shape: Sequence[int]) -> Value:
    _axes(arg)
    return fd.add(arg.dtype, _sizes(new_shape), lambda x: x.reshape(new_shape), (arg,))


def _permute(fd: FusionDefinition, arg: Value, dims: Sequence[int]) -> Value:
    axes = _axes(arg)
    check(sorted(dims) == list(range(len(axes))), f"not an order of {len(axes)} dimensions: {dims}")
    return fd.add(arg.dtype, tuple(axes[dim] for dim in dims), lambda x: x.permute(tuple(dims)), (arg,))


def _cat(fd: FusionDefinition, tensors: Sequence[Value], dim: int) -> Value:
    check(len({tensor.dtype for tensor in tensors}) == 1, f"cat of {tensors}")

    def compute(values: Sequence[Tensor]) -> Tensor:
        _same_sizes(tensors, values, but=dim)
        return torch.cat([*values], dim)

    axes = _joined(tensors)
    return fd.add(tensors[0].dtype, (*axes[:dim], None, *axes[dim + 1 :]), compute, (tensors,))


def _full(fd: FusionDefinition, shape: Sequence[int], fill_value: Any, dtype: DataType) -> Value:
    fits = fill_value.dtype is dtype if isinstance(fill_value, Value) else type(fill_value) is KINDS[dtype]
    check(fits, f"{fill_value!r} is not a number of {dtype}")
    return fd.add(dtype, _sizes(shape), lambda fill: torch.full(shape, fill, dtype=dtype.value), (fill_value,))


def _all(names: str, takes: Sequence[type], *, gives: DataType | None = None) -> dict[str, Any]:
    return {name: _elementwise(getattr(torch, name), takes, gives=gives) for name in names.split()}


OPERATIONS: Mapping[str, Any] = {
    **_all("cos erf exp log log1p pow reciprocal relu rsqrt sigmoid sin sqrt tanh", [float]),
    "silu": _elementwise(F.silu, [float]),
    "truediv": _elementwise(torch.true_divide, [float]),
    **_all("abs add mul neg sub", [float, int]),
    **_all("eq ge gt le lt ne", [float, int, bool], gives=DataType.Bool),
    "logical_and": _elementwise(torch.logical_and, [bool]),
    "where": _elementwise(torch.where, [float, int, bool]),
    **{"broadcast": _broadcast, "cast": _cast, "cat": _cat, "expand": _expand, "full": _full, "permute": _permute},
    **{"reshape": _reshape, "set": _cast, "squeeze": _squeeze, "var_mean": _var_mean},
    "max": _reduction(torch.amax),
    "sum": _reduction(torch.sum),
}
"""The function that adds each operation to a definition, by nvFuser's name."""


def _map(value: Any, function: Callable[[Value], Any]) -> Any:
    """Replace each `Value` in a call's argument."""
    if isinstance(value, Value):
        return function(value)
    return type(value)(_map(element, function) for element in value) if isinstance(value, list | tuple) else value


def _text(value: Any) -> str:
    """An argument as Python that needs no import but `DataType`."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    finite = not isinstance(value, float) or -torch.inf < value < torch.inf
    return repr(value) if finite else f'float("{value}")'


class FusionDefinition:
    """`nvfuser_direct.FusionDefinition`, with a `script()` of its calls."""

    stand_in: StandIn

    def __init__(self) -> None:
        self.ops = types.SimpleNamespace(**{name: functools.partial(self._operate, name) for name in OPERATIONS})
        self.inputs: list[Value] = []
        self._checks: list[Callable[[Any], None]] = []
        self._outputs: list[Value] = []
        self._steps: list[tuple[Value, Callable[..., Any], tuple[Any, ...]]] = []
        self._lines: list[str] = []

    def __enter__(self) -> FusionDefinition:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if error_type is None:
            self.stand_in.defined.append(self)

    def _operate(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self.record(f"fd.ops.{name}", OPERATIONS[name](self, *args, **kwargs), *args, **kwargs)

    def record(self, function: str, made: Any, *args: Any, **kwargs: Any) -> Any:
        """Record a call, and return its result."""
        texts = [*map(_text, args), *(f"{name}={_text(value)}" for name, value in kwargs.items())]
        targets = ", ".join(map(str, made)) if isinstance(made, tuple) else made
        self._lines.append(f"{f'{targets} = ' if made is not None else ''}{function}({', '.join(texts)})")
        return made

    def script(self) -> str:
        """Python code that builds this definition, given `fd` and `DataType`."""
        return "\n".join(self._lines)

    def add(
        self,
        dtype: DataType,
        axes: Axes,
        compute: Callable[..., Any],
        arguments: tuple[Any, ...],
        computes: bool = True,
    ) -> Value:
        """Add a value that `compute` makes of the arguments; only casts and copies accept half precision."""

        def checked(value: Value) -> None:
            check(not computes or value.dtype in KINDS, f"{value} is {value.dtype}: cast it to Float first")

        _map(arguments, checked)
        made = self._value(dtype, axes)
        self._steps.append((made, compute, arguments))
        return made

    def _value(self, dtype: DataType, axes: Axes | None) -> Value:
        check(axes is None or len(axes) <= 8, "a tensor has at most 8 dimensions")
        number = len(self.inputs) + len(self._steps)
        return Value(f"{'s' if axes is None else 't'}{number}", dtype, axes)

    def define_scalar(self, value: Any, dtype: DataType) -> Value:
        """A constant."""
        check(type(value) is KINDS[dtype], f"{value!r} is not a number of {dtype}")
        made = self._value(dtype, None)
        self._steps.append((made, lambda: value, ()))
        return self.record("fd.define_scalar", made, value, dtype)

    def define_tensor(
        self, *, shape: Any, contiguity: Any, dtype: DataType, is_cpu: bool, stride_order: Sequence[int]
    ) -> Value:
        """An input; `shape` has 1 or -1, `contiguity` is outermost first, `stride_order` counts from the innermost."""
        rank = len(shape)
        check(sorted(stride_order) == list(range(rank)), f"not an order of {rank} dimensions: {stride_order}")
        outer_first = sorted(range(rank), key=lambda dim: -stride_order[dim])
        dense = dict(zip(outer_first, contiguity, strict=True))
        check(all(size == -1 or dense[dim] is None for dim, size in enumerate(shape)), "a size of 1 is not contiguous")
        made = self._value(dtype, tuple(size == 1 for size in shape))

        def check_tensor(tensor: Tensor) -> None:
            got = (tensor.dtype, tensor.dim(), tensor.is_cpu and tensor.dim() == 0)
            check(got == (dtype.value, rank, is_cpu), f"{made} was defined as {dtype}, {rank}, {is_cpu}: got {got}")
            stride = 1
            for dim in reversed(outer_first):
                size, actual = tensor.shape[dim], tensor.stride(dim)
                check(shape[dim] == -1 or size == 1, f"dimension {dim} of {made} was defined as 1, got {size}")
                check(shape[dim] == 1 or dense[dim] is not None or actual == 0, f"{made} was defined as expanded")
                check(not dense[dim] or size == 1 or actual == stride, f"{made} was defined as contiguous in {dim}")
                if dense[dim] is not None and size != 1:
                    stride = actual * size

        self.inputs.append(made)
        self._checks.append(check_tensor)
        arguments = {"shape": shape, "contiguity": contiguity, "dtype": dtype, "is_cpu": is_cpu}
        return self.record("fd.define_tensor", made, **arguments, stride_order=stride_order)

    def add_output(self, output: Value) -> None:
        """Add an output, which may not be an input or another output."""
        _axes(output)
        check(output not in (*self.inputs, *self._outputs), f"{output} is an input or an output already")
        self._outputs.append(output)
        self.record("fd.add_output", None, output)

    def execute(self, inputs: Sequence[Any], *, device: torch.device | None = None) -> list[Tensor]:
        """Compute the outputs."""
        for check_input, value in zip(self._checks, inputs, strict=True):
            check_input(value)
        values = dict(zip(self.inputs, inputs, strict=True))
        with torch.no_grad():
            for made, compute, arguments in self._steps:
                result = compute(*_map(arguments, values.__getitem__))
                if made.axes is not None:
                    assert (result.dtype, result.dim()) == (made.dtype.value, len(made.axes)), made
                values[made] = result
        self.stand_in.executions += 1
        return [values[output] for output in self._outputs]


class StandIn(types.ModuleType):
    """A module to import as `nvfuser_direct`; CPU tensors count as GPU tensors.

    Attributes:
        defined: the finished definitions.
        executions: the number of times that definitions were executed.
    """

    def __init__(self) -> None:
        super().__init__("nvfuser_direct")
        self.defined: list[FusionDefinition] = []
        self.executions = 0
        self.DataType = DataType
        self.FusionDefinition = type("FusionDefinition", (FusionDefinition,), {"stand_in": self})
