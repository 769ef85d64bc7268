"""A stand-in for `nvfuser_direct`: the same names, as strict or stricter, executed with torch on the CPU.

nvFuser needs a GPU and its own wheel. What is translated for it can still be tested without either: this module records
a definition through the same methods, refuses what the binding refuses, and computes it with torch. It is written after
nvFuser 0.2.36, and compared with its wheels by `compare_binding`. What it cannot show is what nvFuser makes of a valid
definition: its schedules, its speed, its bugs.

Where the two differ on purpose:

- Tensors of one dimension or more pretend to be on a GPU while `pretends_cuda` is True. A tensor without dimensions is
  what it is: on the CPU, so its input must say `is_cpu=True`; while `scalars_pretend` is True, it pretends as well.
- It refuses what nvFuser lets pass to no good end: a definition that is changed after its `with`, more inputs than were
  defined, more than eight dimensions.
- Outputs have the strides that torch gives them, which may follow an input's or be a view of it. nvFuser promises no
  more: only `stride_order` fixes a layout.
"""

import importlib.machinery
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.partition.compilers.nvfuser.data_types import DataType, of_torch, to_torch
from tests.partition.compilers.nvfuser.elementwise import ELEMENTWISE
from tests.partition.compilers.nvfuser.reductions import REDUCTIONS
from tests.partition.compilers.nvfuser.shaping import SHAPING
from tests.partition.compilers.nvfuser.signatures import (
    ADD_OUTPUT,
    DEFINE_SCALAR,
    DEFINE_TENSOR,
    OVERLOADS,
    Bound,
    Overload,
    bound,
)
from tests.partition.compilers.nvfuser.values import Axis, Fusion, Scalar, TensorView, Val, checked

__all__ = ["EXECUTED", "VERSION", "FusionDefinition", "StandIn", "compute_tensor_descriptor", "replay"]

VERSION = "0.2.36"
"""The version of nvFuser that this was written after, and that it says it is."""

EXECUTED: Mapping[str, Any] = {**ELEMENTWISE, **SHAPING, **REDUCTIONS}
"""The operations that this executes; `OVERLOADS` has the others too, and calling one of them says so."""

_TYPES_OF_INPUTS = (
    DataType.Double,
    DataType.Float,
    DataType.Half,
    DataType.BFloat16,
    DataType.Int,
    DataType.Int32,
    DataType.Bool,
    DataType.ComplexFloat,
    DataType.ComplexDouble,
)


def compute_tensor_descriptor(sizes: Sequence[int], strides: Sequence[int]) -> tuple[list[bool | None], list[int]]:
    """Contiguity, outermost first, and stride order, by dimension, 0 the fastest: as nvFuser finds them."""
    checked(len(sizes) == len(strides), "Sizes and strides must have the same number of dimensions")
    for dim, stride in enumerate(strides):
        checked(stride >= 0, f"negative stride on tensor is not supported: strides[{dim}]={stride}")
    order = sorted((dim for dim, stride in enumerate(strides) if stride), key=lambda dim: -strides[dim])
    for dim, stride in enumerate(strides):
        if not stride:
            order.insert(dim, dim)
    stride_order = [len(order) - 1 - order.index(dim) for dim in range(len(order))]
    contiguity: list[bool | None] = []
    for place, dim in enumerate(order):
        if strides[dim] == 0 or sizes[dim] == 1:
            contiguity.append(None)
            continue
        inner = next((one for one in order[place + 1 :] if strides[one] and sizes[one] != 1), None)
        contiguity.append(strides[dim] == (1 if inner is None else strides[inner] * sizes[inner]))
    return contiguity, stride_order


def _values_of(value: Any) -> Iterator[Val]:
    if isinstance(value, Val):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _values_of(one)


def _written(value: Any) -> str:
    """A value of a call as Python that needs no import but `DataType`."""
    if isinstance(value, (list, tuple)):
        inner = ", ".join(map(_written, value))
        if isinstance(value, list):
            return f"[{inner}]"
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, float) and not -torch.inf < value < torch.inf:
        return f'float("{value}")'
    return repr(value)


class _Ops:
    """`nvfuser_direct.ops`: works on the fusion whose `with` is open, whoever's attribute it is."""

    def __init__(self, stand_in: "StandIn") -> None:
        self._stand_in = stand_in

    def __getattr__(self, name: str) -> Any:
        if name not in OVERLOADS:
            raise AttributeError(f"module 'nvfuser_direct.ops' has no attribute '{name}'")
        return lambda *args, **kwargs: self._stand_in.active().called(name, args, kwargs)


class FusionDefinition:
    """`nvfuser_direct.FusionDefinition`, and what a test wants to know of it: `script()` and `executions`."""

    _stand_in: "StandIn"

    def __init__(self) -> None:
        self.ops = self._stand_in.ops
        self.executions = 0
        self._fusion: Fusion | None = None

    def __enter__(self) -> "FusionDefinition":
        checked(self._fusion is None, "this FusionDefinition was defined already")
        self._fusion = Fusion(self._called)
        self._stand_in.open.append(self._fusion)
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        self._stand_in.open.pop()
        if error_type is None:
            self._stand_in.defined.append(self)

    def __repr__(self) -> str:
        return "a FusionDefinition that is not defined" if self._fusion is None else self.script()

    @property
    def fusion(self) -> Fusion | None:
        return self._fusion

    def _active(self) -> Fusion:
        fusion = self._stand_in.active()
        checked(fusion is self._fusion, "another FusionDefinition is being defined")
        return fusion

    def _record(self, fusion: Fusion, made: Any, function: str, call: Bound) -> Any:
        """Writes a call down, with names for what it made."""
        values = list(_values_of(made))
        for value in values:
            if id(value) not in fusion.names:
                # A value is kept with its name: an id is only its own as long as it lives.
                kept = fusion.tensors if isinstance(value, TensorView) else fusion.scalars
                fusion.names[id(value)] = f"{'t' if kept is fusion.tensors else 's'}{len(kept)}"
                kept.append(value)
        targets = ", ".join(map(repr, values))
        if isinstance(made, list) and len(values) == 1:
            targets += ","
        written = f"{function}({call.written(_written)})"
        fusion.lines.append(f"{targets} = {written}" if values else written)
        return made

    def _bound(
        self, fusion: Fusion, name: str, overloads: tuple[Overload, ...], args: Any, kwargs: Mapping[str, Any]
    ) -> Bound:
        call = bound(name, overloads, tuple(args), kwargs)
        for value in _values_of(call.values):
            checked(
                value.fusion is fusion,
                f"Input to {name} is invalid, it was not found in the active container.",
            )
        return call

    def _called(self, name: str, args: Any, kwargs: Mapping[str, Any]) -> Any:
        fusion = self._active()
        call = self._bound(fusion, name, OVERLOADS[name], args, kwargs)
        if name not in EXECUTED:
            raise NotImplementedError(f"{name} is in nvfuser_direct, but is not executed by this stand-in")
        by_position = [
            value for one, value in zip(call.overload.parameters, call.values, strict=True) if one.name is None
        ]
        return self._record(fusion, EXECUTED[name](fusion, *by_position, **call.named()), f"fd.ops.{name}", call)

    def define_tensor(self, *args: Any, **kwargs: Any) -> TensorView:
        """An input: `shape` with -1 for a size that may change, or `sizes` and `strides` of an example."""
        fusion = self._active()
        call = bound("define_tensor", DEFINE_TENSOR, args, kwargs)
        given = call.named()
        if "sizes" in given:
            contiguity, stride_order = compute_tensor_descriptor(given["sizes"], given["strides"])
            shape = [size if size == 1 or given["static_sizes"] else -1 for size in given["sizes"]]
        else:
            shape, stride_order = list(given["shape"]), list(given["stride_order"])
            contiguity = given["contiguity"]
        tensor = self._input(fusion, shape, contiguity, given["dtype"], stride_order, is_cpu=given["is_cpu"])
        made: TensorView = self._record(fusion, tensor, "fd.define_tensor", call)
        return made

    def _input(
        self,
        fusion: Fusion,
        shape: Sequence[int],
        contiguity: Sequence[bool | None] | bool,
        dtype: DataType,
        stride_order: Sequence[int],
        *,
        is_cpu: bool,
    ) -> TensorView:
        rank = len(shape)
        for dim, size in enumerate(shape):
            checked(
                size >= -1,
                f"The value {size} at index {dim} was neither symbolic(-1), zero_element(0), broadcast(1), or "
                "static(>1).",
            )
        checked(
            len(stride_order) in (0, rank),
            f"Length of stride_order argument ({len(stride_order)}) must be zero or match that of shape argument "
            f"({rank})",
        )
        checked(
            not stride_order or sorted(stride_order) == list(range(rank)),
            f"stride_order is not a valid: {list(stride_order)}",
        )
        if dtype not in _TYPES_OF_INPUTS:
            raise NotImplementedError(f"an input of {dtype!r} is not executed by this stand-in")
        place = [rank - 1 - order for order in stride_order] or list(range(rank))
        if isinstance(contiguity, bool):
            by_dim: list[bool | None] = [None if size == 1 else contiguity for size in shape]
            contiguity = [by_dim[place.index(at)] for at in range(rank)]
        checked(
            len(contiguity) == rank,
            f"Length of contiguity argument ({len(contiguity)}) must match that of shape argument ({rank})",
        )
        axes = []
        for dim, size in enumerate(shape):
            known = None if size == -1 else size
            if contiguity[place[dim]] is None:
                axes.append(Axis("broadcast", known, is_expanded=size != 1))
            else:
                checked(
                    size != 1,
                    "The contiguity of a broadcast/reduction dimension must be None. The contiguity of a "
                    f"non-broadcast/reduction dimension must be true/false. shape={list(shape)}, "
                    f"contiguity={list(contiguity)}",
                )
                axes.append(Axis("iteration", known))
        checked(not is_cpu or not shape, "CPU non-scalar tensor is not supported!")
        tensor = TensorView(fusion, dtype, axes, is_cpu=is_cpu)
        tensor.allocation = tuple(place.index(at) for at in range(rank))
        tensor.contiguity = tuple(contiguity)
        fusion.inputs.append(tensor)
        return tensor

    def define_scalar(self, *args: Any, **kwargs: Any) -> Scalar:
        """A number that is known, or, of a DataType alone, an input."""
        fusion = self._active()
        call = bound("define_scalar", DEFINE_SCALAR, args, kwargs)
        given = call.named()
        if given.get("value") is None:
            checked(given["dtype"] is not None, "a scalar without a value needs a DataType")
            scalar = Scalar(fusion, given["dtype"])
            fusion.inputs.append(scalar)
        else:
            scalar = fusion.constant(given["value"], given["dtype"])
        made: Scalar = self._record(fusion, scalar, "fd.define_scalar", call)
        return made

    def define_vector(self, size: int) -> list[Scalar]:
        """That many integer inputs."""
        return [self.define_scalar(None, DataType.Int) for _ in range(size)]

    def from_pytorch(self, tensor: Tensor, static_sizes: bool = False) -> TensorView:
        """The input that a tensor would fit."""
        if not (tensor.dim() == 0 or self._stand_in.counts_as_cuda(tensor)):
            raise ValueError(f"Found unsupported device {tensor.device}, only scalar CPU or CUDA tensors are supported")
        return self.define_tensor(
            sizes=tuple(tensor.size()),
            strides=tensor.stride(),
            dtype=of_torch(tensor.dtype),
            static_sizes=static_sizes,
            is_cpu=tensor.dim() == 0 and not self._stand_in.counts_as_cuda(tensor),
        )

    def add_output(self, *args: Any, **kwargs: Any) -> None:
        """An output; with `alias_input`, one that is written into that input and not returned."""
        fusion = self._active()
        call = self._bound(fusion, "add_output", ADD_OUTPUT, args, kwargs)
        output, alias = (*call.values, None)[:2]
        checked(isinstance(output, TensorView), f"Non-TensorView outputs are not supported at this point: {output!r}")
        checked(alias is None or alias in fusion.inputs, f"alias source can only be a fusion input, got {alias!r}")
        fusion.outputs.append((output, alias))
        self._record(fusion, None, "fd.add_output", call)

    def script(self) -> str:
        """The calls that made this definition: Python that needs an `fd` and `DataType`, and makes it again."""
        assert self._fusion is not None, "nothing was defined"
        return self._fusion.print_math()

    def validate_definition(self) -> tuple[bool, str | None]:
        """Whether there is something to execute, and what is missing."""
        if self._fusion is None:
            return (
                False,
                "Fusion does not exist! Use `with FusionDefinition() as fd: ...` to define a fusion.",
            )
        return (True, None) if self._fusion.outputs else (False, "Fusion is empty!")

    def execute(
        self,
        inputs: Iterable[Any],
        *,
        device: Any = None,
        save_repro_inputs: bool = False,
        _enable_options: Sequence[str] = (),
        _disable_options: Sequence[str] = (),
    ) -> list[Tensor]:
        """The outputs for these inputs, in the order in which they were added."""
        is_valid, message = self.validate_definition()
        if not is_valid:
            raise NotImplementedError(message)
        if _enable_options or _disable_options:
            raise NotImplementedError("options are not executed by this stand-in")
        assert device is None or isinstance(device, int) or torch.device(device).type == "cuda", (
            "If device argument is passed it must be a CUDA device"
        )
        fusion = self._fusion
        assert fusion is not None
        checked(fusion not in self._stand_in.open, "a fusion is executed after its definition, outside of the with")
        for output, _ in fusion.outputs:
            checked(
                not output.is_cpu or output in fusion.inputs,
                f"KernelExecutor does not support the Fusion provided. {output!r} is made of CPU scalars alone.",
            )
        # A list of sizes may be given as one input.
        given = [one for each in inputs for one in (each if isinstance(each, (list, tuple)) else (each,))]
        checked(
            len(given) == len(fusion.inputs),
            f"the fusion has {len(fusion.inputs)} inputs, got {len(given)}: KernelArgumentHolder contains less "
            "argument than kernel's input."
            if len(given) < len(fusion.inputs)
            else f"the fusion has {len(fusion.inputs)} inputs, got {len(given)}",
        )
        values: dict[int, Any] = {}
        for position, (value, concrete) in enumerate(zip(fusion.inputs, given, strict=True)):
            self._check(position, value, concrete)
            values[id(value)] = concrete
        with torch.no_grad():
            fusion.run(values)
            for output, alias in fusion.outputs:
                if alias is not None:
                    values[id(output)] = values[id(alias)].copy_(values[id(output)])
        self.executions += 1
        return [values[id(output)] for output, alias in fusion.outputs if alias is None]

    def _check(self, position: int, value: Val, concrete: Any) -> None:
        where = f"Expected input {position}, {value!r}"
        if isinstance(value, TensorView):
            checked(isinstance(concrete, Tensor), where, f", to be an at::Tensor but got scalar {concrete}")
            self._check_tensor(where, value, concrete)
            return
        checked(not isinstance(concrete, Tensor), where, ", to be a scalar but got a tensor")
        checked(
            isinstance(concrete, (int, float, complex)),
            where,
            ": Cannot convert provided py::handle to a PolymorphicValue.",
        )
        checked(
            of_torch(type(concrete)).family == value.data_type.family,
            f"Scalar value {concrete} is not compatible with the expected data type: {value.data_type!r}.",
        )

    def _check_tensor(self, where: str, value: TensorView, concrete: Tensor) -> None:
        checked(
            concrete.dim() == value.ndim,
            where,
            f", to be bound to a tensor of rank {value.ndim}, but got a tensor of rank {concrete.dim()}",
        )
        checked(
            concrete.dtype is to_torch(value.data_type),
            where,
            f", to be bound to a tensor of dtype {value.data_type!r}, but got a tensor of dtype {concrete.dtype}",
        )
        if value.is_cpu:
            checked(
                concrete.is_cpu,
                where,
                f", to be bound to a CPU or meta scalar tensor , but got a tensor on device {concrete.device}",
            )
        else:
            checked(
                self._stand_in.counts_as_cuda(concrete),
                where,
                f", to be bound to a CUDA or meta tensor, but got a tensor on device {concrete.device}",
            )
        for dim, (axis, size, stride) in enumerate(zip(value.axes, concrete.shape, concrete.stride(), strict=True)):
            checked(axis.size in (None, size), where, f": Tried to bind to a constant value: {axis.size} as {size}")
            checked(
                not axis.is_expanded or size == 1 or stride == 0,
                where,
                f" has expanded extent but input tensor has size {size} and stride {stride} in dimension {dim}",
            )
        if concrete.numel():
            self._check_strides(where, value, concrete)

    def _check_strides(self, where: str, value: TensorView, concrete: Tensor) -> None:
        expected = 1
        for dim, contiguous in reversed(list(zip(value.allocation, value.contiguity, strict=True))):
            size, stride = concrete.shape[dim], concrete.stride(dim)
            if value.axes[dim].is_broadcast or size == 1:
                continue
            checked(
                not contiguous or stride == expected,
                where,
                f"'s stride mismatch with contiguity info. sizes: {list(concrete.shape)}: strides: "
                f"{list(concrete.stride())}; contiguity: {list(value.contiguity)}; dim: {dim}; expected stride: "
                f"{expected}",
            )
            expected = stride * size


class StandIn(types.ModuleType):
    """A module to put where `nvfuser_direct` is imported from.

    `defined` are the definitions that were finished under it, in their order; each counts its own executions.
    """

    def __init__(self, *, pretends_cuda: bool = True, scalars_pretend: bool = False) -> None:
        super().__init__("nvfuser_direct", "A stand-in for nvfuser_direct, executed with torch.")
        self.pretends_cuda = pretends_cuda
        self.scalars_pretend = scalars_pretend
        self.defined: list[FusionDefinition] = []
        self.open: list[Fusion] = []
        self.ops = _Ops(self)
        self.DataType = DataType
        self.TensorView = TensorView
        self.Val = Val
        self.FusionDefinition = type("FusionDefinition", (FusionDefinition,), {"_stand_in": self})
        self.compute_tensor_descriptor = compute_tensor_descriptor
        # It has none: it makes no kernels.
        self.schedule = types.SimpleNamespace(find_compatible_schedulers=lambda fusion, inputs: [])
        self.__version__ = VERSION
        self.__spec__ = importlib.machinery.ModuleSpec("nvfuser_direct", None, is_package=True)
        self.__path__: list[str] = []
        self.pytorch_utils = types.ModuleType("nvfuser_direct.pytorch_utils")
        self.pytorch_utils.torch_dtype_to_nvfuser_dtype = of_torch  # type: ignore[attr-defined]
        self.pytorch_utils.python_scalar_to_nvfuser_dtype = lambda number: of_torch(type(number))  # type: ignore[attr-defined]

    def version(self) -> str:
        return self.__version__

    @property
    def executions(self) -> int:
        """How often the finished definitions were executed, together."""
        return sum(definition.executions for definition in self.defined)

    def active(self) -> Fusion:
        """The fusion whose `with` is open."""
        checked(self.open, "Need an active container to build IR.")
        return self.open[-1]

    def counts_as_cuda(self, tensor: Tensor) -> bool:
        """Whether a tensor is on a GPU, or may pretend to be."""
        pretends = self.pretends_cuda and (tensor.dim() > 0 or self.scalars_pretend)
        return tensor.is_cuda or (pretends and tensor.is_cpu)


def replay(script: str, package: Any) -> Any:
    """The definition that a script makes, in `package`: this stand-in, or the real one."""
    fd = package.FusionDefinition()
    with fd:
        exec(script, {"fd": fd, "DataType": package.DataType})
    return fd
