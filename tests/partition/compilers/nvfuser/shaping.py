"""The operations that move, repeat, cut and pick elements, and those that make tensors out of nothing.

After nvFuser 0.2.36, `csrc/ops/alias.cpp`, `csrc/ops/indexing.cpp` and the factories of `csrc/ops/arith.cpp`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from tests.partition.compilers.nvfuser.data_types import DataType, to_torch
from tests.partition.compilers.nvfuser.elementwise import ELEMENTWISE, as_val, cast, joined_axes, same_sizes
from tests.partition.compilers.nvfuser.values import Axis, Fusion, Scalar, TensorView, Val, axis_of_size, checked

__all__ = ["SHAPING", "broadcast", "wrapped"]


def wrapped(dim: int, rank: int) -> int:
    """A dimension counted from the front. Raises RuntimeError where there is none."""
    found = dim + rank if dim < 0 else dim
    checked(0 <= found < rank, f"Tried to access out of boundary index {dim}. total index: {rank}")
    return found


def _sizes(fusion: Fusion, given: Sequence[Any], *, are_shape: bool = True) -> list[Scalar]:
    """The scalars of a list that may mix integers and scalars."""
    made = []
    for index, one in enumerate(given):
        if isinstance(one, int):
            checked(
                not are_shape or one >= -1,
                f"The value {one} at index {index} was neither symbolic(-1), zero_element(0), broadcast(1), or "
                "static(>1).",
            )
            made.append(fusion.constant(one))
        else:
            checked(isinstance(one, Scalar), f"Unsupported iterable object type for define_vector! Index:{index}")
            checked(one.data_type.is_integral, f"a size must be an integer, got a {one.data_type!r}")
            made.append(one)
    return made


def _known(sizes: Sequence[Scalar]) -> list[int | None]:
    return [size.value for size in sizes]


def _extent(axis: Axis) -> int | None:
    """The size of an axis if it were not expanded: what nvFuser calls its extent."""
    return 1 if axis.is_broadcast else axis.size


def broadcast(fusion: Fusion, arg: TensorView, is_broadcast_dim: Sequence[bool]) -> TensorView:
    """New axes of size 1, where `is_broadcast_dim` says so."""
    kept = sum(not new for new in is_broadcast_dim)
    checked(
        kept == arg.ndim,
        "Invalid broadcast, number of false entries in is_broadcast_dim expected to be ",
        f"{arg.ndim} but received {kept}",
    )
    if kept == len(is_broadcast_dim):
        return arg
    old = iter(arg.axes)
    axes = [Axis("broadcast", 1) if new else next(old) for new in is_broadcast_dim]
    added = [dim for dim, new in enumerate(is_broadcast_dim) if new]

    def computed(value: Tensor) -> Tensor:
        for dim in added:
            value = value.unsqueeze(dim)
        return value

    return fusion.tensor(arg.data_type, axes, [arg], computed)


def _expand(fusion: Fusion, arg: TensorView, shape: Sequence[Any]) -> TensorView:
    sizes = _sizes(fusion, shape)
    checked(len(sizes) >= arg.ndim, f"expand needs at least {arg.ndim} sizes, got {len(sizes)}")
    arg = broadcast(fusion, arg, [True] * (len(sizes) - arg.ndim) + [False] * arg.ndim)
    axes = []
    for axis, size in zip(arg.axes, sizes, strict=True):
        wanted, extent = size.value, _extent(axis)
        if wanted == -1:
            axes.append(axis)
        elif extent == 1 and wanted != 1:
            checked(
                not axis.is_expanded or wanted is None or axis.size in (None, wanted),
                f"an axis that is expanded to {axis.size} is not expanded to {wanted}",
            )
            axes.append(Axis("broadcast", wanted, is_expanded=True))
        elif extent is None:
            axes.append(Axis(axis.kind, wanted))
        else:
            checked(
                wanted is None or wanted == extent,
                f"Invalid expand size, {wanted}, for an axis of size {extent}",
            )
            axes.append(axis)

    def computed(value: Tensor, *wanted: int) -> Tensor:
        full = [have if want == -1 else want for have, want in zip(value.shape, wanted, strict=True)]
        for axis, have, want in zip(arg.axes, value.shape, full, strict=True):
            checked(
                have == want or (have == 1 and axis.kind != "iteration"),
                f"Mismatch in sizes when concretizing expand: {have} is not expanded to {want}. A size that was not 1 "
                "when the fusion was defined is never broadcast.",
            )
        return value.expand(full)

    return fusion.tensor(arg.data_type, axes, [arg, *sizes], computed)


def _broadcast_in_dim(
    fusion: Fusion, arg: TensorView, shape: Sequence[Any], broadcast_dims: Sequence[int]
) -> TensorView:
    checked(
        arg.ndim == len(broadcast_dims) <= len(shape),
        f"broadcast_in_dim needs one of the output's {len(shape)} dimensions for each of the input's {arg.ndim}, "
        f"got {list(broadcast_dims)}",
    )
    new = [True] * len(shape)
    for dim in broadcast_dims:
        at = wrapped(dim, len(shape))
        checked(new[at], f"nonbroadcast_dim ({at}) is specified more than once.")
        new[at] = False
    return _expand(fusion, broadcast(fusion, arg, new), shape)


def _reshape(fusion: Fusion, arg: TensorView, new_shape: Sequence[Any]) -> TensorView:
    sizes = _sizes(fusion, new_shape)
    known = _known(sizes)
    checked(known.count(-1) <= 1, "A maximum of one value of -1 can be provided to reshape.")
    old = [axis.size for axis in arg.axes]
    if None not in old and None not in known:
        elements = torch.Size([size for size in old if size is not None]).numel()
        new = [size for size in known if size is not None]
        others = torch.Size([size for size in new if size != -1]).numel()
        fits = others != 0 and elements % others == 0 if -1 in new else others == elements
        checked(fits, f"Total element counts across view operation must match: {old} to {new}")
        axes = [axis_of_size(elements // others if size == -1 else size) for size in new]
    else:
        axes = [Axis("symbolic", None if size == -1 else size) for size in known]

    def computed(value: Tensor, *wanted: int) -> Tensor:
        others = torch.Size([size for size in wanted if size != -1]).numel()
        checked(
            value.numel() % others == 0 if -1 in wanted and others else value.numel() == others,
            f"Total element counts across view operation must match: {list(value.shape)} to {list(wanted)}",
        )
        return value.reshape(wanted)

    return fusion.tensor(arg.data_type, axes, [arg, *sizes], computed)


def _permute(fusion: Fusion, arg: TensorView, dims: Sequence[int]) -> TensorView:
    checked(
        arg.ndim == len(dims),
        f"Operator permute expects `dims` argument to have the same length as input! {len(dims)} is not {arg.ndim}",
    )
    order = [wrapped(dim, arg.ndim) for dim in dims]
    checked(sorted(order) == list(range(arg.ndim)), f"permute needs every dimension once, got {list(dims)}")
    return fusion.tensor(
        arg.data_type, [arg.axes[dim] for dim in order], [arg], lambda value: value.permute(tuple(order))
    )


def _squeeze(fusion: Fusion, arg: TensorView, dims: Sequence[int], squeeze_expanded: bool) -> TensorView:
    checked(len(dims) <= arg.ndim, "The dims to squeeze must be <= the number of dims of the input tensor.")
    gone = set()
    for dim in dims:
        at = dim + arg.ndim if dim < 0 else dim
        checked(0 <= at < arg.ndim, f"Squeeze dim is outside of Tensor size! Tensor Size: {arg.ndim} Dim: {dim}")
        axis = arg.axes[at]
        if axis.kind != "symbolic":
            checked(axis.is_broadcast, "Can not squeeze non-broadcasting dimension(s).")
            checked(
                squeeze_expanded or not axis.is_expanded,
                f"Refusing to squeeze expanded IterDomain of dimension {at}. To force removal of this axis, use "
                "squeeze_expanded=true.",
            )
        gone.add(at)

    def computed(value: Tensor) -> Tensor:
        for at in sorted(gone, reverse=True):
            checked(
                value.shape[at] == 1 or arg.axes[at].is_expanded,
                f"Can not squeeze dimension(s) with size != 1, dimension {at} has size {value.shape[at]}.",
            )
            value = value.select(at, 0)
        return value

    axes = [axis for dim, axis in enumerate(arg.axes) if dim not in gone]
    return fusion.tensor(arg.data_type, axes, [arg], computed)


def _slice(
    fusion: Fusion,
    arg: TensorView,
    start_indices: Sequence[Any],
    end_indices: Sequence[Any],
    strides: Sequence[Any] | None,
    manual_normalization: bool,
) -> TensorView:
    starts = _sizes(fusion, start_indices, are_shape=False)
    ends = _sizes(fusion, end_indices, are_shape=False)
    steps = _sizes(fusion, [1] * len(starts) if strides is None else strides, are_shape=False)
    checked(
        len(starts) == len(steps),
        f"Slice start_indices and strides don't match! Start Indices: {len(starts)} Strides: {len(steps)}",
    )
    checked(
        arg.ndim == len(starts),
        f"Number of tensor dimensions does not match slice dimensions! {arg.ndim} is not {len(starts)}",
    )
    checked(
        len(starts) == len(ends),
        "Slice indexing attribute dimensions don't match! ",
        f"Start Indices: {len(starts)} End Indices: {len(ends)}",
    )
    axes = []
    for axis, start, end, step in zip(arg.axes, _known(starts), _known(ends), _known(steps), strict=True):
        checked(
            start is None or start >= 0,
            f"Slice operation start_indices must be greater than or equal to 0. Start Indices: {start}",
        )
        checked(
            start is None or end is None or end >= start,
            "Slice operation end_indices must be greater than or equal to start_indices. ",
            f"Start Indices: {start} End Indices: {end}",
        )
        checked(step == 1, "nvFuser Limitation: All slice operation strides must be of const size 1.")
        if start is None or end is None or axis.size is None:
            axes.append(axis_of_size(None))
        elif start == 0 and end >= axis.size:
            axes.append(axis)
        else:
            axes.append(axis_of_size(max(0, min(end, axis.size) - start)))

    def computed(value: Tensor, *limits: int) -> Tensor:
        for dim, (start, end) in enumerate(zip(limits[: arg.ndim], limits[arg.ndim :], strict=True)):
            size = value.shape[dim]
            checked(
                not manual_normalization or 0 <= start <= end <= size,
                f"manual_normalization promises 0 <= start <= end <= size, got {start}, {end}, {size}",
            )
            first = min(start + size if start < 0 else start, size)
            last = max(first, min(end + size if end < 0 else end, size))
            value = value.narrow(dim, max(first, 0), last - max(first, 0))
        return value

    return fusion.tensor(arg.data_type, axes, [arg, *starts, *ends], computed)


def _similar(first: DataType, second: DataType) -> bool:
    return first.family == second.family


def _pad(fusion: Fusion, arg: TensorView, pad_widths: Sequence[Any], value: Any) -> TensorView:
    checked(len(pad_widths) <= 2 * arg.ndim, "Number of pad widths must be at most twice the input dimension")
    checked(len(pad_widths) % 2 == 0, f"Invalid number of padding widths: {len(pad_widths)}")
    widths = _sizes(fusion, pad_widths, are_shape=False)
    filler = fusion.constant(0, arg.data_type) if value is None else as_val(fusion, value)
    checked(
        isinstance(filler, Scalar) and _similar(arg.data_type, filler.data_type),
        f"Tensor arg and pad value must have the same dtype. Got {arg.data_type!r} and {filler.data_type!r}",
    )
    known = _known(widths)
    axes = list(arg.axes)
    for place in range(len(known) // 2):
        left, right = known[2 * place], known[2 * place + 1]
        dim = arg.ndim - 1 - place
        if left != 0 or right != 0:
            size = axes[dim].size
            axes[dim] = axis_of_size(None if left is None or right is None or size is None else left + size + right)

    def computed(operand: Tensor, fill: Any, *limits: int) -> Tensor:
        return torch.constant_pad_nd(operand, limits, fill)

    return fusion.tensor(arg.data_type, axes, [arg, filler, *widths], computed)


def _cat(fusion: Fusion, tensors: Sequence[TensorView], dim: int, manual_padding: bool) -> TensorView:
    if manual_padding:
        raise NotImplementedError("cat with manual_padding=True is not executed by this stand-in")
    checked(tensors, "No input tensor given")
    first = tensors[0]
    for tensor in tensors:
        checked(
            tensor.data_type is first.data_type,
            f"Can't concatenate tensors with different data types: {first.data_type!r}, {tensor.data_type!r}",
        )
        checked(tensor.ndim == first.ndim, f"Unexpected number of dimensions: {tensor.ndim}, expected: {first.ndim}")
    at = dim + first.ndim if dim < 0 else dim
    checked(0 <= at < first.ndim, f"Invalid dimension to cat: {dim}")
    if len(tensors) == 1:
        made: TensorView = ELEMENTWISE["set"](fusion, first)
        return made
    sizes = [tensor.axes[at].size for tensor in tensors]
    known = [size for size in sizes if size is not None]
    stacked = axis_of_size(sum(known) if len(known) == len(sizes) else None)
    others = [TensorView(fusion, one.data_type, [*one.axes[:at], *one.axes[at + 1 :]]) for one in tensors]
    met = joined_axes(others)

    def computed(*values: Tensor) -> Tensor:
        # The real one would stretch an axis of size 1 here; nothing that torch can say needs that.
        return torch.cat(values, at)

    return fusion.tensor(first.data_type, [*met[:at], stacked, *met[at:]], tensors, computed)


def _size(fusion: Fusion, arg: TensorView, dim: int) -> Scalar:
    at = wrapped(dim, arg.ndim)
    size = arg.axes[at].size
    if size is not None:
        return Scalar(fusion, DataType.Index, size)
    return fusion.scalar(DataType.Index, [arg], lambda value: value.shape[at])


def _shape(fusion: Fusion, arg: TensorView) -> list[Scalar]:
    return [_size(fusion, arg, dim) for dim in range(arg.ndim)]


def _stride_order(fusion: Fusion, arg: TensorView, stride_order: Sequence[int]) -> TensorView:
    if not stride_order:
        made: TensorView = ELEMENTWISE["set"](fusion, arg)
        return made
    checked(
        len(stride_order) == arg.ndim,
        "Operator stride_order expects `stride_order` argument to have the same length as input!",
    )
    checked(sorted(stride_order) == list(range(arg.ndim)), f"stride_order is not a valid: {list(stride_order)}")
    outermost_first = sorted(range(arg.ndim), key=lambda dim: -stride_order[dim])
    back = [outermost_first.index(dim) for dim in range(arg.ndim)]

    def computed(value: Tensor) -> Tensor:
        return value.permute(outermost_first).clone(memory_format=torch.contiguous_format).permute(back)

    return fusion.tensor(arg.data_type, arg.axes, [arg], computed)


def _dim_of(name: str, arg: TensorView, index: TensorView, dim: int) -> int:
    checked(arg.ndim > 0, f"{name} can not be applied to 0d tensor.")
    checked(arg.ndim == index.ndim, f"Tensor arguments have different dimensions {arg.ndim} and {index.ndim}")
    checked(
        -arg.ndim <= dim < arg.ndim,
        f"Tensor arguments have dimension {arg.ndim} so dim argument must satisfy {-arg.ndim} <= dim < {arg.ndim}, "
        f"but received {dim}",
    )
    checked(index.data_type.is_integral, f"an index must be an integer tensor, got {index.data_type!r}")
    return wrapped(dim, arg.ndim)


def _gather(fusion: Fusion, arg: TensorView, index: TensorView, dim: int) -> TensorView:
    at = _dim_of("torch.gather", arg, index, dim)
    return fusion.tensor(
        arg.data_type, index.axes, [arg, index], lambda value, where: value.gather(at, where.to(torch.int64))
    )


def _take_along_axis(fusion: Fusion, arg: TensorView, index: TensorView, dim: int) -> TensorView:
    at = _dim_of("take_along_axis", arg, index, dim)
    others = [TensorView(fusion, one.data_type, [*one.axes[:at], *one.axes[at + 1 :]]) for one in (arg, index)]
    met = joined_axes(others)

    def computed(value: Tensor, where: Tensor) -> Tensor:
        same_sizes(others, [value.select(at, 0), where.select(at, 0)])
        return torch.take_along_dim(value, where.to(torch.int64), at)

    return fusion.tensor(arg.data_type, [*met[:at], index.axes[at], *met[at:]], [arg, index], computed)


def _index_select(fusion: Fusion, arg: TensorView, index: TensorView, dim: int) -> TensorView:
    at = wrapped(dim, arg.ndim)
    checked(index.ndim <= 1, "index_tv must be a 1d or scalar tensor.")
    checked(index.data_type.is_integral, f"an index must be an integer tensor, got {index.data_type!r}")
    axis = index.axes[0] if index.ndim else Axis("broadcast", 1)
    axes = [*arg.axes[:at], axis, *arg.axes[at + 1 :]]
    return fusion.tensor(
        arg.data_type, axes, [arg, index], lambda value, where: value.index_select(at, where.reshape(-1))
    )


def _select(fusion: Fusion, arg: TensorView, index: Val, dim: int) -> TensorView:
    checked(arg.ndim > 0, "select can not be applied to 0d tensor.")
    at = wrapped(dim, arg.ndim)
    axes = [*arg.axes[:at], *arg.axes[at + 1 :]]
    return fusion.tensor(arg.data_type, axes, [arg, index], lambda value, where: value.select(at, int(where)))


def _triu(fusion: Fusion, arg: TensorView, diagonal: int) -> TensorView:
    checked(arg.ndim >= 2, f"input tensor for triu must have 2 or more dims, but got {arg.ndim} dims")
    return fusion.tensor(arg.data_type, arg.axes, [arg], lambda value: value.triu(diagonal))


def _new_shape(fusion: Fusion, shape: Sequence[Any]) -> tuple[list[Scalar], list[Axis]]:
    sizes = _sizes(fusion, shape)
    known = _known(sizes)
    checked(-1 not in known, f"a new tensor needs every size, got {known}")
    return sizes, [axis_of_size(size) for size in known]


def _full(fusion: Fusion, shape: Sequence[Any], fill_value: Any, dtype: DataType) -> TensorView:
    sizes, axes = _new_shape(fusion, shape)
    filler = as_val(fusion, fill_value)
    checked(isinstance(filler, Scalar), "full fills with a scalar, got a tensor")
    if filler.data_type is not dtype:
        filler = cast(fusion, filler, dtype)
    torch_type = to_torch(dtype)
    return fusion.tensor(
        dtype, axes, [filler, *sizes], lambda fill, *limits: torch.full(limits, fill, dtype=torch_type)
    )


def _iota(fusion: Fusion, length: Any, start: Any, step: Any, dtype: DataType) -> TensorView:
    size = as_val(fusion, length)
    checked(size.data_type.is_integral, f"length must be integer, but get dtype {size.data_type!r}")
    first = fusion.constant(0, dtype) if start is None else as_val(fusion, start)
    stride = fusion.constant(1, dtype) if step is None else as_val(fusion, step)
    for name, one in (("start", first), ("step", stride)):
        checked(
            one.data_type.family == dtype.family in ("integral", "floating"),
            f"iota: {name} dtype does not match specified dtype argument, should be {dtype!r} but get "
            f"{one.data_type!r}",
        )
    checked(not isinstance(stride, Scalar) or stride.value != 0, "iota: step value must not equal zero.")
    torch_type = to_torch(dtype)

    def computed(count: int, begin: Any, by: Any) -> Tensor:
        return (torch.arange(count, dtype=torch_type) * by + begin).to(torch_type)

    known = size.value if isinstance(size, Scalar) else None
    return fusion.tensor(dtype, [axis_of_size(known)], [size, first, stride], computed)


def _drawn(shape: Sequence[int], *, normal: bool, seed: int | None, offset: int | None) -> Tensor:
    """Numbers in float: of numpy's Philox by seed and offset, or else of torch's generator, as eager draws them."""
    if seed is None or offset is None:
        return torch.randn(tuple(shape)) if normal else torch.rand(tuple(shape))
    generator = numpy.random.Generator(numpy.random.Philox(key=seed % 2**64, counter=offset % 2**64))
    drawn = generator.standard_normal(tuple(shape)) if normal else generator.random(tuple(shape), numpy.float32)
    return torch.as_tensor(drawn, dtype=torch.float32)


def _distribution(*, is_normal: bool) -> Callable[..., TensorView]:
    def operation(
        fusion: Fusion,
        shape: Sequence[Any],
        rng_seed: Val | None,
        rng_offset: Val | None,
        dtype: DataType,
        **limits: Any,
    ) -> TensorView:
        checked((rng_seed is None) == (rng_offset is None), "rng_seed and rng_offset must be provided together!")
        checked(dtype.is_floating, f"Random distributions only create floating point types! {dtype!r}")
        sizes, axes = _new_shape(fusion, shape)
        first, second = (
            as_val(fusion, limits[name]) for name in (("mean", "std") if is_normal else ("minval", "maxval"))
        )
        random_state = [one for one in (rng_seed, rng_offset) if one is not None]
        torch_type = to_torch(dtype)

        def computed(low: Any, high: Any, *rest: Any) -> Tensor:
            state, wanted = rest[: len(random_state)], rest[len(random_state) :]
            seed, offset = (int(one) for one in state) if state else (None, None)
            drawn = _drawn(wanted, normal=is_normal, seed=seed, offset=offset)
            return (low + drawn * (high if is_normal else high - low)).to(torch_type)

        return fusion.tensor(dtype, axes, [first, second, *random_state, *sizes], computed)

    return operation


def _random_like(*, is_normal: bool) -> Callable[..., TensorView]:
    def operation(fusion: Fusion, x: Any) -> TensorView:
        checked(isinstance(x, TensorView), "random numbers are drawn like a tensor, got a scalar")
        checked(x.data_type.is_floating, f"input must have floating point type, but got {x.data_type!r}")
        torch_type = to_torch(x.data_type)
        return fusion.tensor(
            x.data_type,
            x.axes,
            [x],
            lambda value: _drawn(value.shape, normal=is_normal, seed=None, offset=None).to(torch_type),
        )

    return operation


SHAPING: Mapping[str, Callable[..., Any]] = {
    "broadcast": broadcast,
    "broadcast_in_dim": _broadcast_in_dim,
    "cat": _cat,
    "expand": _expand,
    "full": _full,
    "gather": _gather,
    "index_select": _index_select,
    "iota": _iota,
    "normal": _distribution(is_normal=True),
    "pad": _pad,
    "permute": _permute,
    "rand_like": _random_like(is_normal=False),
    "randn_like": _random_like(is_normal=True),
    "reshape": _reshape,
    "select": _select,
    "shape": _shape,
    "size": _size,
    "slice": _slice,
    "squeeze": _squeeze,
    "stride_order": _stride_order,
    "take_along_axis": _take_along_axis,
    "triu": _triu,
    "uniform": _distribution(is_normal=False),
}
"""What each of these operations does, by its name: a function of the fusion and the arguments."""
