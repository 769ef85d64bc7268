"""The reductions and the scans: which axes they leave, in which type, and how torch computes them.

After nvFuser 0.2.36, `csrc/ops/arith.cpp` and `csrc/ops/normalization.cpp`. Nothing here promotes half precision,
and only the maximum of it compiles.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.partition.compilers.nvfuser.data_types import DataType, to_torch
from tests.partition.compilers.nvfuser.elementwise import ELEMENTWISE, cast, compiled
from tests.partition.compilers.nvfuser.shaping import SHAPING, broadcast, wrapped
from tests.partition.compilers.nvfuser.values import Axis, Fusion, TensorView, Val, checked

__all__ = ["REDUCTIONS"]


def _reduced_axes(arg: TensorView, dims: Sequence[int]) -> list[int]:
    checked(len(dims) > 0, "No reduction axis specified")
    found = [wrapped(dim, arg.ndim) for dim in dims]
    checked(len(set(found)) == len(found), f"a reduction names an axis once, got {list(dims)}")
    return sorted(found)


def _last(value: Tensor, dims: Sequence[int]) -> Tensor:
    """The reduced axes at the end, as one."""
    kept = [dim for dim in range(value.dim()) if dim not in dims]
    moved = value.permute(*kept, *dims)
    return moved.reshape([*moved.shape[: len(kept)], -1])


def _summed(value: Tensor) -> Tensor:
    return value.sum(-1, dtype=value.dtype)


def _multiplied(value: Tensor) -> Tensor:
    return value.prod(-1, dtype=value.dtype)


def _extreme(*, largest: bool) -> Callable[[Tensor], Tensor]:
    def function(value: Tensor) -> Tensor:
        if value.shape[-1]:
            return value.amax(-1) if largest else value.amin(-1)
        if value.dtype is torch.bool:
            return torch.full(value.shape[:-1], not largest)
        if value.dtype.is_floating_point:
            return torch.full(value.shape[:-1], -torch.inf if largest else torch.inf, dtype=value.dtype)
        limits = torch.iinfo(value.dtype)
        return torch.full(value.shape[:-1], limits.min if largest else limits.max, dtype=value.dtype)

    return function


def _without(arg: TensorView, dims: Sequence[int]) -> list[Axis]:
    return [axis for dim, axis in enumerate(arg.axes) if dim not in dims]


def _reduced(
    fusion: Fusion, function: Callable[[Tensor], Tensor], arg: TensorView, dims: Sequence[int], keepdim: bool
) -> TensorView:
    checked(len(dims) > 0, "No reduction axis specified")
    if not arg.ndim:
        made: TensorView = ELEMENTWISE["set"](fusion, arg)
        return made
    gone = _reduced_axes(arg, dims)
    out = fusion.tensor(arg.data_type, _without(arg, gone), [arg], lambda value: function(_last(value, gone)))
    return broadcast(fusion, out, [dim in gone for dim in range(arg.ndim)]) if keepdim else out


def _reduction(name: str, function: Callable[[Tensor], Tensor], *, casts: bool) -> Callable[..., TensorView]:
    def operation(
        fusion: Fusion,
        arg: TensorView,
        dtype: DataType,
        dim: int | None = None,
        dims: Sequence[int] | None = None,
        keepdim: bool = False,
    ) -> TensorView:
        if dim is not None:
            dims = [dim]
        elif dims is None:
            dims = range(arg.ndim)
        if casts and dtype is DataType.Null and arg.data_type.family in ("integral", "bool"):
            dtype = DataType.Int
        checked(casts or dtype is DataType.Null, "A dtype other than Null is not currently supported.")
        if dtype not in (DataType.Null, arg.data_type):
            arg = cast(fusion, arg, dtype)
        if name != "max":
            compiled(name, arg.data_type)
        return _reduced(fusion, function, arg, dims, keepdim)

    return operation


def _number_of(fusion: Fusion, arg: TensorView, dims: Sequence[int]) -> Val:
    number: Val = fusion.constant(1.0)
    for dim in dims if arg.ndim else ():
        number = ELEMENTWISE["mul"](fusion, number, SHAPING["size"](fusion, arg, dim))
    return number


def _denominator(fusion: Fusion, arg: TensorView, dims: Sequence[int], correction: int) -> Any:
    checked(correction >= 0, f"correction must be non-negative, but got {correction}")
    left = ELEMENTWISE["sub"](fusion, _number_of(fusion, arg, dims), correction)
    return ELEMENTWISE["where"](fusion, ELEMENTWISE["ge"](fusion, left, 0), left, 0)


def _reciprocal(fusion: Fusion, value: Any) -> Any:
    return ELEMENTWISE["reciprocal"](fusion, value)


def _var(fusion: Fusion, arg: TensorView, dims: Sequence[int], correction: int, keepdim: bool) -> Any:
    denominator = _denominator(fusion, arg, dims, correction)
    total = REDUCTIONS["sum"](fusion, arg=arg, dims=dims, keepdim=True, dtype=DataType.Null)
    centred = ELEMENTWISE["sub"](fusion, arg, ELEMENTWISE["div"](fusion, total, _number_of(fusion, arg, dims)))
    squares = ELEMENTWISE["mul"](fusion, centred, centred)
    of_squares = REDUCTIONS["sum"](fusion, arg=squares, dims=dims, keepdim=keepdim, dtype=DataType.Null)
    return ELEMENTWISE["mul"](fusion, of_squares, _reciprocal(fusion, denominator))


def _welford(fusion: Fusion, arg: TensorView, dims: Sequence[int]) -> tuple[TensorView, TensorView, TensorView]:
    checked(arg.ndim > 0, "Tried to reduce a 0-dim tensor")
    compiled("welford", arg.data_type)
    checked(arg.data_type.is_floating, f"welford is not executed by this stand-in for {arg.data_type!r}")
    gone = _reduced_axes(arg, dims)
    axes = _without(arg, gone)

    def mean(value: Tensor) -> Tensor:
        return _summed(_last(value, gone)) / _last(value, gone).shape[-1]

    def squares(value: Tensor) -> Tensor:
        flat = _last(value, gone)
        return _summed((flat - mean(value)[..., None]) ** 2)

    def count(value: Tensor) -> Tensor:
        flat = _last(value, gone)
        return torch.full(flat.shape[:-1], flat.shape[-1])

    return (
        fusion.tensor(arg.data_type, axes, [arg], mean),
        fusion.tensor(arg.data_type, axes, [arg], squares),
        fusion.tensor(DataType.Index, axes, [arg], count),
    )


def _var_mean(
    fusion: Fusion, arg: TensorView, dims: Sequence[int], correction: int, keepdim: bool
) -> tuple[TensorView, TensorView]:
    checked(
        not arg.data_type.is_reduced,
        f"variance_mean is not supported for {arg.data_type!r} please upcast to float",
    )
    denominator = _denominator(fusion, arg, dims, correction)
    mean, squares, _ = _welford(fusion, arg, dims)
    variance: TensorView = ELEMENTWISE["mul"](fusion, squares, _reciprocal(fusion, denominator))
    if keepdim:
        gone = _reduced_axes(arg, dims)
        new = [dim in gone for dim in range(arg.ndim)]
        variance, mean = broadcast(fusion, variance, new), broadcast(fusion, mean, new)
    return variance, mean


def _scanned(combined: Callable[[Tensor, Tensor], Tensor], value: Tensor, dim: int) -> Tensor:
    """One element after the other, each rounded to the type of the values."""
    parts = list(value.unbind(dim))
    for place in range(1, len(parts)):
        parts[place] = combined(parts[place - 1], parts[place])
    return torch.stack(parts, dim) if parts else value


def _scan(name: str, combined: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., TensorView]:
    def operation(fusion: Fusion, arg: TensorView, dim: int, init: Val | None) -> TensorView:
        if init is not None:
            raise NotImplementedError("a scan from an initial value is not executed by this stand-in")
        compiled(name, arg.data_type)
        at = wrapped(dim, arg.ndim)
        checked(not arg.axes[at].is_expanded, "Closed-form scan of expanded dimension is not yet implemented")
        torch_type = to_torch(arg.data_type)
        return fusion.tensor(arg.data_type, arg.axes, [arg], lambda value: _scanned(combined, value, at).to(torch_type))

    return operation


REDUCTIONS: Mapping[str, Callable[..., Any]] = {
    "sum": _reduction("sum", _summed, casts=True),
    "prod": _reduction("prod", _multiplied, casts=True),
    "max": _reduction("max", _extreme(largest=True), casts=False),
    "min": _reduction("min", _extreme(largest=False), casts=False),
    "var": _var,
    "var_mean": _var_mean,
    "welford": _welford,
    "cumsum": _scan("cumsum", torch.add),
    "cumprod": _scan("cumprod", torch.mul),
    "cummin": _scan("cummin", torch.minimum),
    "cummax": _scan("cummax", torch.maximum),
}
"""What each of these operations does, by its name: a function of the fusion and the arguments."""
