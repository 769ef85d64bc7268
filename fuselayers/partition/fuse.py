"""fuse -- trace forward and backward together, choose what to save, compile both.

The front is `torch.compile`: Dynamo's guards make sure that another shape, dtype, device, requires_grad, train/eval
mode, grad mode or Python value never meets a graph that was traced for something else. What is ours begins behind it:
the partitioner that cuts the joint graph, and the chain of backends.
"""

import copy
import functools
import inspect
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final, overload

import torch
from torch import nn

from .backends import BackendUnavailableError, check_backends, compile_chain
from .fused_module import FusedModule
from .partitioners import Partitioner, partitioner
from .torch_private import BackendCompilerFailed, torch_compile

__all__ = ["FusedFunction", "fuse", "memory_efficient_fusion"]

# Dynamo's own limit is 8 graphs for one function, after which it runs eager without a word.
_RECOMPILE_LIMIT: Final = 64


@overload
def fuse(  # type: ignore[overload-overlap]
    fn: nn.Module,
    /,
    *,
    backend: str = ...,
    partition: str | Partitioner = ...,
    fallback: Sequence[str] = ...,
    static_argnums: int | Sequence[int] = ...,
    static_argnames: str | Sequence[str] = ...,
    dynamic: bool | None = ...,
    fullgraph: bool = ...,
) -> FusedModule: ...
@overload
def fuse(
    fn: Callable[..., Any],
    /,
    *,
    backend: str = ...,
    partition: str | Partitioner = ...,
    fallback: Sequence[str] = ...,
    static_argnums: int | Sequence[int] = ...,
    static_argnames: str | Sequence[str] = ...,
    dynamic: bool | None = ...,
    fullgraph: bool = ...,
) -> "FusedFunction": ...
def fuse(
    fn: nn.Module | Callable[..., Any],
    /,
    *,
    backend: str = "auto",
    partition: str | Partitioner = "min_cut",
    fallback: Sequence[str] = ("inductor", "eager"),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    dynamic: bool | None = None,
    fullgraph: bool = False,
) -> "FusedModule | FusedFunction":
    """Return `fn`, fused: the same values and gradients, fewer kernels, fewer bytes kept for backward.

    Args:
        fn: a function of tensors, or a module. A module comes back as a `FusedModule`, which shares its parameters,
            buffers, mode and state_dict keys; the module itself stays as it is.
        backend: "auto" (Inductor where it can compile, else eager), "eager" or "inductor".
        partition: "min_cut", "default", or a function with AOTAutograd's partitioner signature.
        fallback: the backends to try when `backend` does not work here, in order; each is said once, as a
            FallbackWarning. With () an error is raised instead.
        static_argnums: positions of arguments that are constants of the graph: hashable values that are not tensors.
            Each combination gets a graph of its own.
        static_argnames: the same for keyword arguments.
        dynamic: None makes a size symbolic when it changes a first time; True from the start; False never.
        fullgraph: True raises where Dynamo would split the function in several graphs.

    Raises:
        ValueError: an unknown backend or partitioner; the message lists what there is.
        TypeError: `fn` cannot be called, or (at the call) a static argument is not hashable.
        BackendUnavailableError: at the call, when no backend of the chain works.

    >>> def outer(a, b):
    ...     return (a + b).cos().cos()
    >>> fused = fuse(outer, backend="eager")
    >>> x = torch.randn(4, requires_grad=True)
    >>> torch.equal(fused(x, x), outer(x, x))
    True
    """
    if not callable(fn):
        raise TypeError(f"fuse takes a function or a module, got {type(fn).__name__}")
    fused = FusedFunction(
        fn,
        chain=check_backends(backend, fallback),
        partition=partition,
        static_argnums=(static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums),
        static_argnames=(static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames),
        dynamic=dynamic,
        fullgraph=fullgraph,
    )
    return FusedModule(fn, fused) if isinstance(fn, nn.Module) else fused


memory_efficient_fusion = fuse
"""functorch's name for `fuse`. Unlike functorch's, it guards: another shape, mode or value never gets a stale graph."""


class FusedFunction:
    """A function that runs through the fusion core. Made by `fuse`; called like the function it wraps.

    Attributes:
        served_by: the backends that compiled graphs of this function so far, in order of first use.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        chain: tuple[str, ...],
        partition: str | Partitioner,
        static_argnums: tuple[int, ...],
        static_argnames: tuple[str, ...],
        dynamic: bool | None,
        fullgraph: bool,
    ) -> None:
        partitioner(partition, fused=True)  # an unknown name is refused here, not at the first call
        self._fn = fn
        self._chain = chain
        self._partition = partition
        self._static_argnums = static_argnums
        self._static_argnames = frozenset(static_argnames)
        self._options = {"dynamic": dynamic, "fullgraph": fullgraph}
        self._compiled: dict[Hashable, Callable[..., Any]] = {}
        self.served_by: tuple[str, ...] = ()
        if not isinstance(fn, nn.Module):
            functools.update_wrapper(self, fn)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Inside another compiler the function is transparent: it is traced as if it had never been fused.
        if torch.compiler.is_compiling():
            return self._fn(*args, **kwargs)
        if not self._static_argnums and not self._static_argnames:
            return _call(self._compile_for((), {}), args, kwargs)
        positions = {place % len(args) for place in self._static_argnums if -len(args) <= place < len(args)}
        static = tuple((place, args[place]) for place in sorted(positions))
        named = {name: value for name, value in kwargs.items() if name in self._static_argnames}
        rest = [value for place, value in enumerate(args) if place not in positions]
        named_rest = {name: value for name, value in kwargs.items() if name not in named}
        return _call(self._compile_for(static, named), rest, named_rest)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def _compile_for(self, static: tuple[tuple[int, Any], ...], named: dict[str, Any]) -> Callable[..., Any]:
        # The type is part of the key: 1, 1.0 and True are equal and hash alike, but make different graphs.
        key = (
            tuple((place, type(value), value) for place, value in static),
            tuple((name, type(value), value) for name, value in sorted(named.items())),
        )
        try:
            compiled = self._compiled.get(key)
        except TypeError:
            culprit = next(value for _, value in (*static, *named.items()) if not _is_hashable(value))
            raise TypeError(
                f"a static argument must be hashable, got a {type(culprit).__name__}; pass a tuple, or leave it dynamic"
            ) from None
        if compiled is None:
            compiled = torch_compile(
                _with_static_arguments(self._fn, dict(static), named),
                backend=self._backend,
                recompile_limit=_RECOMPILE_LIMIT,
                **self._options,
            )
            self._compiled[key] = compiled
        return compiled

    def _backend(self, graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return compile_chain(
            graph_module, example_inputs, chain=self._chain, partition=self._partition, served=self._note_backend
        )

    def _note_backend(self, name: str) -> None:
        if name not in self.served_by:
            self.served_by += (name,)

    def over(self, fn: Callable[..., Any]) -> "FusedFunction":
        """Return a fused `fn` with this one's options and nothing compiled yet."""
        return FusedFunction(
            fn,
            chain=self._chain,
            partition=self._partition,
            static_argnums=self._static_argnums,
            static_argnames=tuple(self._static_argnames),
            dynamic=self._options["dynamic"],
            fullgraph=bool(self._options["fullgraph"]),
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "FusedFunction":
        return self.over(copy.deepcopy(self._fn, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return _remake, (
            self._fn,
            self._chain,
            self._partition,
            self._static_argnums,
            tuple(self._static_argnames),
            self._options["dynamic"],
            self._options["fullgraph"],
        )


def _remake(
    fn: Callable[..., Any],
    chain: tuple[str, ...],
    partition: str | Partitioner,
    static_argnums: tuple[int, ...],
    static_argnames: tuple[str, ...],
    dynamic: bool | None,
    fullgraph: bool,
) -> FusedFunction:
    return FusedFunction(
        fn,
        chain=chain,
        partition=partition,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        dynamic=dynamic,
        fullgraph=fullgraph,
    )


def _call(compiled: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    try:
        return compiled(*args, **kwargs)
    except BackendCompilerFailed as error:
        # Dynamo wraps what a backend raises in advice about its own settings; ours says what to do.
        if isinstance(error.inner_exception, BackendUnavailableError):
            raise error.inner_exception from error.inner_exception.__cause__
        raise


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _with_static_arguments(fn: Callable[..., Any], static: dict[int, Any], named: dict[str, Any]) -> Callable[..., Any]:
    """Return a function of the remaining arguments, with a code object of its own.

    Dynamo counts graphs per code object. With one code object for all, the values of a static argument would share one
    limit, and so would every function fused in the process.
    """

    def entry(*args: Any, **kwargs: Any) -> Any:
        if not static:
            return fn(*args, **kwargs, **named)
        rest = iter(args)
        merged = [static[place] if place in static else next(rest) for place in range(len(static) + len(args))]
        return fn(*merged, **kwargs, **named)

    name = getattr(fn, "__name__", type(fn).__name__)
    code = entry.__code__.replace(co_name=f"fused_{name}")
    own = types.FunctionType(code, entry.__globals__, code.co_name, None, entry.__closure__)
    own.__kwdefaults__ = None
    if not isinstance(fn, nn.Module):
        own.__doc__ = inspect.getdoc(fn)
    return own
