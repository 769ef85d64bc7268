"""fuse -- trace forward and backward together, choose what to save, compile both.

`torch.compile` comes first: Dynamo's guards compare the shape, dtype, device, requires_grad, train/eval mode, grad mode
and Python values of each call, and a new graph is traced where they differ. Behind the guards the library's partitioner
cuts the joint graph, and the first backend that works compiles both graphs.
"""

import functools
import inspect
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, overload

from torch import nn

from .choose.partitioners import Partitioner
from .fused_function import FusedFunction, FuseOptions
from .fused_module import eager_view, view_of, with_forward

if TYPE_CHECKING:
    from typing_extensions import Unpack

_Module = TypeVar("_Module", bound=nn.Module)


class _Options(TypedDict, total=False):
    """The options of `fuse`, for type checkers."""

    backend: str
    partition: str | Partitioner
    compress: str | None
    fallback: Sequence[str]
    dynamic: bool | None
    fullgraph: bool
    torch_random: bool


@overload
def fuse(fn: _Module, /, **options: "Unpack[_Options]") -> _Module: ...  # type: ignore[overload-overlap]
@overload
def fuse(fn: Callable[..., Any], /, **options: "Unpack[_Options]") -> FusedFunction: ...
@overload
def fuse(fn: None = None, /, **options: "Unpack[_Options]") -> "Callable[[Callable[..., Any]], FusedFunction]": ...
def fuse(
    fn: nn.Module | Callable[..., Any] | None = None,
    /,
    *,
    backend: str = "auto",
    partition: str | Partitioner = "min_cut",
    compress: str | None = None,
    fallback: Sequence[str] = ("inductor", "eager"),
    dynamic: bool | None = None,
    fullgraph: bool = False,
    torch_random: bool = False,
) -> "nn.Module | FusedFunction | Callable[[Callable[..., Any]], FusedFunction]":
    """Return `fn`, fused: the same values and gradients, fewer kernels, fewer bytes saved for backward.

    Also a decorator, with options or without: `@fuse` and `@fuse(backend="eager")`.

    A function gets at most 64 graphs (for shapes, dtypes, modes, Python values). Further calls run eagerly, and torch
    logs a warning; with `fullgraph` they raise. A Python number that changes may become symbolic;
    `functools.partial(fn, power=3)` makes it a constant.

    Args:
        fn: a function of tensors, or a module. For a module, `fuse` returns a `FusedModule`, whose class derives from
            the module's class. Both share all attributes: parameters, buffers, submodules, mode and hooks. The module
            itself still runs eagerly. Only `forward` is compiled. A `__call__` that the class defines runs eagerly
            before it, so that errors of its argument checks keep their text.
        backend: "auto" ("triton" on a GPU, "inductor" elsewhere, "eager" where neither compiles; nothing is measured),
            "eager", "inductor", "triton" (Inductor with this library's kernels, on a GPU), or "nvfuser" (NVIDIA's
            package, on a GPU).
        partition: "min_cut", "default", "budget:0.5" or `budget(0.5)`, "budget:peak:2GB" or `budget(peak="2 GB")`, or a
            function with AOTAutograd's partitioner signature.
        compress: "int8", "float8" or "bfloat16" saves large values for backward in fewer bits, with any partitioner;
            forward's results stay exact. None saves every value exactly. "int8" draws one more seed in each call,
            unless the graph's first random op draws a dropout's seed.
        fallback: the backends to try when `backend` does not work here, in order; a FallbackWarning names each once.
            With () an error is raised instead.
        dynamic: None makes a size symbolic when it first changes; True from the start; False never.
        fullgraph: True raises where Dynamo would split the function in several graphs; the message says at which line.
        torch_random: True draws torch's own random ops (`F.dropout`, `rand_like`) from torch's generator in eager's
            order, so that `torch.manual_seed` gives the numbers of the plain function. False gives `F.dropout` the
            masks of this library, the same on every backend and device, which is cheaper. Neither saves a mask on the
            CPU. True saves 5 KB of generator state for each op, which no budget counts. This library's ops give the
            same mask on every backend either way.

    Raises:
        ValueError: an unknown backend, partitioner or compression; the message lists what there is.
        TypeError: `fn` is not callable, or is a class or a coroutine function; or an option has the wrong type.
        BackendUnavailableError: at the call, when no backend of the chain works.
        PartitionError: at the call, when no backend could cut the graph as asked.

    >>> import torch
    >>> @fuse(backend="eager")
    ... def outer(a, b):
    ...     return (a + b).cos().cos()
    >>> x = torch.randn(4, requires_grad=True)
    >>> torch.equal(outer(x, x), (x + x).cos().cos())
    True
    """
    options = FuseOptions(
        backend=backend,
        partition=partition,
        compress=compress,
        fallback=fallback,
        dynamic=dynamic,
        fullgraph=fullgraph,
        torch_random=torch_random,
    )
    decorate: Any = functools.partial(fuse_with, options)
    return decorate if fn is None else decorate(fn)  # type: ignore[no-any-return]


def fuse_with(options: FuseOptions, fn: Any) -> nn.Module | FusedFunction:
    """Fuse a function or a module. Used by `fuse` and `aot_module`."""
    if not callable(fn):
        raise TypeError(f"fuse takes a function or a module, got {type(fn).__name__}")
    if isinstance(fn, type):
        raise TypeError(f"fuse takes a function or a module, got the class {fn.__name__}; fuse an instance of it")
    if inspect.iscoroutinefunction(fn):
        raise TypeError("fuse takes a function that returns tensors, got a coroutine function; fuse what it awaits")
    if isinstance(fn, nn.Module):
        return with_forward(view_of(eager_view(fn)), _function_of(fn, options))
    return FusedFunction(fn, options=options)


def fuse_in_place(
    modules: Iterable[nn.Module],
    *,
    backend: str = "auto",
    partition: str | Partitioner,
    compress: str | None = None,
) -> None:
    """Fuse modules in place. Modules of one class share graphs if their parameters and buffers have the same sizes.

    Twelve equal blocks are compiled once: their parameters are inputs of the graph. Guards compare the other values
    that forward reads from a module, and one more graph is compiled where they differ.

    Args:
        modules: each gets a class that derives from its class and from `FusedModule`.
        backend, partition, compress: as in `fuse`.

    >>> import torch
    >>> layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> fuse_in_place(layers, backend="eager", partition="min_cut")
    >>> _ = layers(torch.ones(1, 2, requires_grad=True))
    >>> len(layers[1].report().graphs)
    1
    """
    options = FuseOptions(backend=backend, partition=partition, compress=compress)
    functions: dict[Hashable, FusedFunction] = {}
    for module in modules:
        tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        sizes = tuple((name, tensor.shape) for name, tensor in tensors)
        kind = type(module), sizes, id(module) if "forward" in vars(module) else None
        if kind not in functions:
            functions[kind] = _function_of(module, options)
        with_forward(module, functions[kind])


def _function_of(module: nn.Module, options: FuseOptions) -> FusedFunction:
    """Return a module's forward as a fused function of the module and its arguments."""
    module = eager_view(module)
    forward: Any = getattr(type(module), "forward", None)
    forward = forward.fn if isinstance(forward, FusedFunction) else forward
    if not inspect.isfunction(forward) or "forward" in vars(module):
        own = module.forward  # this instance's: compiled, or set by the user

        @functools.wraps(own)
        def forward(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return own(*args, **kwargs)

    return FusedFunction(forward, options=options, owner=type(module))
